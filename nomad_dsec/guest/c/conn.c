/* Connections: reading frames, dispatching them, writing queues. A bad peer loses its connection, nothing more. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "serve.h"
#include "state.h"

#define PARK_US 100000u

static struct conn *conns;
static unsigned conn_count;

void conn_touch(struct conn *c) { c->dirty = true; }

/* The peer broke the protocol: say so, and close once that is written. */
static void conn_fail(struct conn *c, const char *code, const char *field, const char *message)
{
	reply_error(c, 0, code, field, 0, message);
	c->closing = true;
}

static void conn_close(struct conn *c)
{
	streams_drop(c);
	buffer_free(&c->in);
	buffer_free(&c->out);
	c->in.failed = c->out.failed = false;
	c->greeted = c->closing = c->doomed = false;
	if (c->permanent) { /* the port stays, another host will say HELLO */
		source_forget(&c->source);
		c->parked_until_us = now_us() + PARK_US;
		return;
	}
	source_close(&c->source);
	struct conn **at = &conns;
	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	conn_count--;
	loop_free_later(c);
	serve_conn_closed(conn_count);
}

static void hello(struct conn *c, struct span payload)
{
	if (field_int(payload, T_VERSION, 0) != ((uint64_t)WIRE_MAGIC << 32 | WIRE_VERSION)) {
		conn_fail(c, "bad_version", "version", "this dsec-init speaks version 1");
		return;
	}
	c->greeted = true;
	size_t frame = frame_begin(&c->out, FR_HELLO_OK, 0);
	put_int(&c->out, T_VERSION, (uint64_t)WIRE_MAGIC << 32 | WIRE_VERSION);
	put_int(&c->out, T_FEATURES,
	        (trees_exact() ? FEATURE_CGROUP : 0u) | (options.flags & INIT_POWEROFF ? FEATURE_POWEROFF : 0u));
	put_bytes(&c->out, T_BOOT_ID, serve_boot_id(), 16);
	put_int(&c->out, T_MAX_PAYLOAD, MAX_PAYLOAD);
	frame_end(&c->out, frame);
	conn_touch(c);
}

/* DATA, DATA_END, CREDIT, CANCEL: about a stream that is open, or was a moment ago (then they mean nothing). */
static void stream_frame(struct conn *c, const struct header *h, const uint8_t *payload)
{
	struct stream *s = stream_find(c, h->stream);
	if (h->type == FR_CREDIT && h->length != 8) {
		conn_fail(c, "bad_frame", "credit", "CREDIT holds 8 bytes");
		return;
	}
	if (!s)
		return;
	if (h->type == FR_CANCEL) {
		stream_end(s);
		reply_error(c, h->stream, "cancelled", NULL, 0, "cancelled by the host");
		return;
	}
	if (h->type == FR_DATA) {
		s->window -= (int64_t)h->length;
		if (s->window < 0) {
			conn_fail(c, "bad_frame", "data", "more DATA than was credited");
			return;
		}
	}
	if (s->worker) {
		worker_frame(s, h, payload);
	} else if (h->type == FR_CREDIT) {
		uint64_t more = load_u64(payload);
		s->credit += (int64_t)(more < INT32_MAX ? more : INT32_MAX);
		if (s->credit > INT64_MAX / 4)
			s->credit = INT64_MAX / 4;
		conn_touch(c);
	} else if (h->type == FR_DATA) {
		exec_stdin(s, payload, h->length);
	} else {
		exec_stdin_end(s);
	}
}

static void request(struct conn *c, const struct header *h, struct span payload)
{
	const char *field;
	if (!fields_check(payload, &field)) {
		reply_error(c, h->stream, "bad_field", field, 0, *field ? "malformed field" : "fields are cut short");
		return;
	}
	switch (h->type) {
	case FR_PING:
		reply_ok(c, h->stream);
		break;
	case FR_SHUTDOWN:
		reply_ok(c, h->stream);
		loop_stop(0);
		break;
	case FR_EXEC:
		exec_request(c, h->stream, payload);
		break;
	case FR_ATTACH:
		exec_attach(c, h->stream, payload);
		break;
	case FR_SIGNAL:
		exec_signal(c, h->stream, payload);
		break;
	case FR_RESIZE:
		exec_resize(c, h->stream, payload);
		break;
	case FR_LIST_EXECS:
		exec_list(c, h->stream, payload);
		break;
	case FR_FORGET:
		exec_forget(c, h->stream, payload);
		break;
	default:
		if (!worker_start(c, h, payload))
			reply_error(c, h->stream, "unknown_verb", NULL, 0, "no such request");
	}
}

static void dispatch(struct conn *c, const struct header *h, const uint8_t *payload)
{
	if (h->type == FR_HELLO && h->stream == 0 && (!c->greeted || c->permanent)) {
		streams_drop(c);
		hello(c, (struct span){payload, h->length});
	} else if (!c->greeted) {
		conn_fail(c, "bad_version", NULL, "the first frame is HELLO");
	} else if (h->stream == 0) {
		conn_fail(c, "bad_stream", NULL, "stream 0 carries HELLO only");
	} else if (h->type >= FR_CREDIT && h->type <= FR_DATA_END) {
		stream_frame(c, h, payload);
	} else if (stream_find(c, h->stream)) {
		conn_fail(c, "bad_stream", NULL, "that stream is in use");
	} else {
		request(c, h, (struct span){payload, h->length});
	}
}

/* A new host on a permanent port may follow a half-written frame of the old one: look for its HELLO. */
static bool resync(struct conn *c)
{
	static const uint8_t start[8] = {14, 0, 0, 0, FR_HELLO, 0, 0, 0};
	const uint8_t *at = c->in.data + c->in.start;
	size_t size = buffer_size(&c->in);
	for (size_t i = 1; i + sizeof start <= size; i++)
		if (memcmp(at + i, start, sizeof start) == 0) {
			buffer_consume(&c->in, i);
			return true;
		}
	buffer_consume(&c->in, size > sizeof start ? size - sizeof start : 0);
	return false;
}

static void parse(struct conn *c)
{
	struct header h;
	while (!c->closing && buffer_size(&c->out) < OUT_FULL) {
		const uint8_t *at = c->in.data + c->in.start;
		enum parse result = header_parse(at, buffer_size(&c->in), &h);
		if (result == PARSE_BAD) {
			if (c->permanent && resync(c))
				continue;
			if (!c->permanent)
				conn_fail(c, "bad_frame", "length", "not a frame header");
			return;
		}
		if (result == PARSE_OK && c->permanent && !c->greeted && h.type != FR_HELLO) {
			if (!resync(c)) /* what the host before this one has left in the pipe */
				return;
			continue;
		}
		if (result == PARSE_MORE || buffer_size(&c->in) < HEADER_SIZE + h.length)
			return;
		dispatch(c, &h, at + HEADER_SIZE);
		buffer_consume(&c->in, HEADER_SIZE + h.length);
	}
}

/* Bytes that the frame at the front still lacks, or a first mouthful. */
static size_t wanted(const struct conn *c)
{
	struct header h;
	size_t have = buffer_size(&c->in);
	if (header_parse(c->in.data + c->in.start, have, &h) != PARSE_OK || HEADER_SIZE + h.length <= have)
		return 4096;
	return HEADER_SIZE + h.length - have + HEADER_SIZE;
}

static void conn_ready(struct source *source, uint32_t events)
{
	struct conn *c = (struct conn *)source;
	if (events & EPOLLOUT)
		conn_touch(c);
	if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)))
		return;
	if (c->closing) { /* it may not read our last words; do not spin on what it still sends */
		if (read(source->fd, scratch, sizeof scratch) <= 0)
			c->doomed = true;
		conn_touch(c);
		return;
	}
	size_t want = wanted(c);
	uint8_t *at = buffer_reserve(&c->in, want + 1); /* + 1: see terminate() in child.c */
	ssize_t n = at ? read(source->fd, at, want) : 0;
	if (n > 0) {
		c->in.end += (size_t)n;
		parse(c);
	} else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
		c->doomed = true;
	}
	conn_touch(c);
}

/* True when something more could be sent if there were room. */
static bool pump(struct conn *c)
{
	for (size_t i = 0; i < 32; i++)
		for (struct stream *s = c->streams[i], *next; s; s = next) {
			next = s->next;
			if (!conn_has_room(c))
				return true;
			if (s->worker)
				worker_resume(s);
			else
				exec_pump(s);
		}
	return !conn_has_room(c);
}

static void conn_write(struct conn *c)
{
	while (buffer_size(&c->out) > 0 && !c->doomed) {
		ssize_t n = write(c->source.fd, c->out.data + c->out.start, buffer_size(&c->out));
		if (n > 0)
			buffer_consume(&c->out, (size_t)n);
		else if (n < 0 && errno == EAGAIN)
			break;
		else if (n == 0 || errno != EINTR)
			c->doomed = true;
	}
}

/* One round of sending; true when another may send more at once. */
static bool conn_flush(struct conn *c)
{
	c->dirty = false;
	bool was_full = buffer_size(&c->out) >= OUT_FULL;
	bool more = !c->closing && pump(c);
	conn_write(c);
	if (was_full && !c->doomed)
		parse(c);
	if (c->out.failed || c->in.failed || (c->closing && buffer_size(&c->out) == 0))
		c->doomed = true;
	if (c->doomed) {
		conn_close(c);
		return false;
	}
	size_t waiting = buffer_size(&c->out);
	uint32_t events = (waiting < OUT_FULL ? EPOLLIN : 0u) | (waiting || more ? EPOLLOUT : 0u);
	if (events != c->events)
		source_events(&c->source, events);
	c->events = events;
	return more && waiting == 0;
}

void conns_flush(void)
{
	for (struct conn *c = conns, *next; c; c = next) {
		next = c->next;
		for (int i = 0; i < 8 && (c->dirty || i) && c->source.fd >= 0 && conn_flush(c); i++)
			;
	}
}

uint64_t conns_deadline(void)
{
	uint64_t next = UINT64_MAX;
	for (struct conn *c = conns; c; c = c->next)
		if (c->parked_until_us && c->parked_until_us < next)
			next = c->parked_until_us;
	return next;
}

/* A port without a host on the other side reports EPOLLHUP for ever, so it is looked at now and then instead. */
void conns_tick(void)
{
	for (struct conn *c = conns; c; c = c->next) {
		if (!c->parked_until_us || now_us() < c->parked_until_us)
			continue;
		struct pollfd p = {.fd = c->source.fd, .events = POLLIN};
		c->parked_until_us = now_us() + PARK_US;
		if (poll(&p, 1, 0) >= 0 && !(p.revents & (POLLHUP | POLLERR))) {
			c->parked_until_us = 0;
			c->events = EPOLLIN;
			source_add(&c->source, c->source.fd, EPOLLIN, conn_ready);
		}
	}
}

struct conn *conn_open(int fd, bool permanent)
{
	struct conn *c = calloc(1, sizeof *c);
	if (!c) {
		close(fd);
		return NULL;
	}
	c->permanent = permanent;
	c->next = conns;
	conns = c;
	conn_count++;
	c->events = EPOLLIN;
	source_add(&c->source, fd, EPOLLIN, conn_ready);
	return c;
}

void conn_accept(struct source *listener, uint32_t events)
{
	(void)events;
	int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	if (fd < 0)
		return;
	struct conn *c = conn_count < CONN_MAX + 1 ? conn_open(fd, false) : NULL;
	if (!c)
		close(fd);
	else if (conn_count > CONN_MAX)
		conn_fail(c, "busy", NULL, "too many connections");
}
