/* Streams of a connection, and the short answers on them. */
#include <stdlib.h>

#include "state.h"

void reply_ok(struct conn *c, uint32_t stream)
{
	frame_end(&c->out, frame_begin(&c->out, FR_OK, stream));
	conn_touch(c);
}

void reply_error(struct conn *c, uint32_t stream, const char *code, const char *field, int error, const char *message)
{
	put_error(&c->out, stream, code, field, error, message);
	conn_touch(c);
}

struct stream *stream_find(struct conn *c, uint32_t id)
{
	struct stream *s = c->streams[id % 32];
	while (s && s->id != id)
		s = s->next;
	return s;
}

struct stream *stream_new(struct conn *c, uint32_t id)
{
	struct stream *s = c->stream_count < CONN_STREAMS_MAX ? calloc(1, sizeof *s) : NULL;
	if (!s) {
		reply_error(c, id, "busy", NULL, 0, "too many streams on this connection");
		return NULL;
	}
	s->conn = c;
	s->id = id;
	s->credit = WINDOW;
	s->window = WINDOW;
	s->next = c->streams[id % 32];
	c->streams[id % 32] = s;
	c->stream_count++;
	return s;
}

void stream_end(struct stream *s)
{
	if (s->exec)
		exec_detach(s);
	if (s->worker)
		worker_detach(s);
	struct stream **at = &s->conn->streams[s->id % 32];
	while (*at != s)
		at = &(*at)->next;
	*at = s->next;
	s->conn->stream_count--;
	loop_free_later(s);
}

void streams_drop(struct conn *c)
{
	for (size_t i = 0; i < 32; i++)
		while (c->streams[i])
			stream_end(c->streams[i]);
}
