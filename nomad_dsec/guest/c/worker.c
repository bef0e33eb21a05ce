/* PID 1's side of workers: fork one for a request, relay its frames, be rid of it. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "state.h"
#include "work.h"

#define GRACE_US 2000000u
#define PENDING_MAX (2u * WINDOW)

struct worker {
	struct source source;
	struct worker *next;
	struct stream *stream; /* NULL: nobody is interested (any more) */
	pid_t pid;	       /* 0: reaped */
	uint64_t kill_us;
	struct buffer pending; /* frames that its socket did not take yet */
	bool watch;
};

static struct worker *workers;

static void worker_free(struct worker *w)
{
	struct worker **at = &workers;
	while (*at != w)
		at = &(*at)->next;
	*at = w->next;
	source_close(&w->source);
	buffer_free(&w->pending);
	loop_free_later(w);
}

static void arm(struct worker *w)
{
	if (w->source.fd >= 0)
		source_events(&w->source, (w->stream->paused ? 0u : EPOLLIN) | (buffer_size(&w->pending) ? EPOLLOUT : 0u));
}

void worker_detach(struct stream *s)
{
	struct worker *w = s->worker;
	s->worker = NULL;
	w->stream = NULL;
	source_close(&w->source); /* it sees that, cleans up and ends; or else is killed */
	w->kill_us = now_us() + GRACE_US;
	if (w->pid == 0)
		worker_free(w);
}

bool worker_reaped(pid_t pid)
{
	struct worker *w = workers;
	while (w && w->pid != pid)
		w = w->next;
	if (!w)
		return false;
	w->pid = 0;
	if (!w->stream) /* else what it has sent is still to be read */
		worker_free(w);
	return true;
}

/* One frame from the worker to the connection; false when there is none now or the stream has ended. */
static bool relay(struct worker *w)
{
	struct stream *s = w->stream;
	struct conn *c = s->conn;
	struct header h;
	ssize_t n = recv(w->source.fd, scratch, sizeof scratch, MSG_DONTWAIT);
	/* A worker that ends with credit unread makes this fail once, before its last frames are given out (unix(7)). */
	if (n < 0 && errno == ECONNRESET)
		n = recv(w->source.fd, scratch, sizeof scratch, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	/* What a worker says is checked like a stranger's words: it has read hostile files. */
	bool good = n >= (ssize_t)HEADER_SIZE && header_parse(scratch, (size_t)n, &h) == PARSE_OK &&
	            (size_t)n == HEADER_SIZE + h.length;
	bool known = good && (h.type == FR_OK || h.type == FR_ERROR || h.type == FR_ITEM || h.type == FR_DATA ||
	                      (h.type == FR_CREDIT && h.length == 8));
	if (!known) {
		reply_error(c, s->id, "worker_died", NULL, 0, "the process doing this was killed or ran out of memory");
		stream_end(s);
		return false;
	}
	if (h.type == FR_CREDIT)
		s->window += (int64_t)(load_u64(scratch + HEADER_SIZE) & INT32_MAX);
	store_u32(scratch + 8, s->id);
	buffer_append(&c->out, scratch, (size_t)n);
	conn_touch(c);
	if (h.type != FR_OK && h.type != FR_ERROR)
		return true;
	stream_end(s);
	return false;
}

static void flush_pending(struct worker *w)
{
	while (buffer_size(&w->pending)) {
		const uint8_t *at = w->pending.data + w->pending.start;
		size_t n = HEADER_SIZE + load_u32(at);
		if (send(w->source.fd, at, n, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
			return; /* full: EPOLLOUT comes; broken: reading tells */
		buffer_consume(&w->pending, n);
	}
}

static void worker_ready(struct source *source, uint32_t events)
{
	struct worker *w = (struct worker *)source;
	if (events & EPOLLOUT)
		flush_pending(w);
	for (int i = 0; i < 8 && w->stream; i++) {
		if (!conn_has_room(w->stream->conn)) {
			w->stream->paused = true;
			conn_touch(w->stream->conn);
			break;
		}
		if (!relay(w))
			break;
	}
	if (w->stream)
		arm(w);
}

void worker_resume(struct stream *s)
{
	if (!s->paused)
		return;
	s->paused = false;
	arm(s->worker);
}

void worker_frame(struct stream *s, const struct header *h, const uint8_t *payload)
{
	struct worker *w = s->worker;
	uint8_t header[HEADER_SIZE];
	header_write(header, h->length, h->type, 0);
	buffer_append(&w->pending, header, sizeof header);
	buffer_append(&w->pending, payload, h->length);
	if (w->pending.failed || buffer_size(&w->pending) > PENDING_MAX) {
		reply_error(s->conn, s->id, "busy", NULL, 0, "more frames than this verb takes");
		stream_end(s);
		return;
	}
	flush_pending(w);
	arm(w);
}

static bool is_verb(uint8_t type)
{
	return (type >= FR_READ && type <= FR_WATCH) || (type >= FR_CLOCK_SET && type <= FR_POLICY_PROBE);
}

static bool full(bool watch)
{
	unsigned count = 0;
	for (struct worker *w = workers; w; w = w->next)
		count += w->watch == watch;
	return count >= (watch ? WATCH_MAX : WORKER_MAX);
}

bool worker_start(struct conn *c, const struct header *h, struct span payload)
{
	int pair[2];
	bool watch = h->type == FR_WATCH, inside;
	if (!is_verb(h->type))
		return false;
	struct stream *s = full(watch) ? NULL : stream_new(c, h->stream);
	if (!s) {
		reply_error(c, h->stream, "busy", NULL, 0, "too many file requests at once");
		return true;
	}
	struct worker *w = calloc(1, sizeof *w);
	if (!w || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
		free(w);
		reply_error(c, h->stream, "no_memory", NULL, errno, "no process could be made for this");
		stream_end(s);
		return true;
	}
	pid_t pid = fork_into(NULL, &inside);
	if (pid == 0)
		work_main(pair[1], h->type, payload);
	close(pair[1]);
	if (pid < 0) {
		close(pair[0]);
		free(w);
		reply_error(c, h->stream, "no_processes", NULL, errno, "no process could be made for this");
		stream_end(s);
		return true;
	}
	w->pid = pid;
	w->stream = s;
	w->watch = watch;
	s->worker = w;
	w->next = workers;
	workers = w;
	source_add(&w->source, pair[0], EPOLLIN, worker_ready);
	return true;
}

uint64_t workers_deadline(void)
{
	uint64_t next = UINT64_MAX;
	for (struct worker *w = workers; w; w = w->next)
		if (w->kill_us && w->kill_us < next)
			next = w->kill_us;
	return next;
}

void workers_tick(void)
{
	if (workers_deadline() > now_us())
		return;
	for (struct worker *w = workers; w; w = w->next)
		if (w->kill_us && w->pid && w->kill_us <= now_us()) {
			kill(w->pid, SIGKILL);
			w->kill_us = now_us() + GRACE_US; /* it may be stuck in the kernel; being told once more costs little */
		}
}
