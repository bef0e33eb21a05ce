/* What flows to and from an exec, and its end. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "state.h"

#define PTY_DRAIN_US 50000u /* a terminal hands over its last bytes by a kernel work queue, some time after the end */

static void readers_touch(const struct exec *e)
{
	for (struct stream *s = e->attached; s; s = s->next_attached)
		conn_touch(s->conn);
}

static void out_close(struct exec *e, int i)
{
	if (e->pty)
		source_close(&e->in);
	source_close(&e->out[i]);
	if (e->ended && !e->tree && e->out[1 - i].fd < 0)
		e->background = false;
}

/* Read once, at most `max` bytes; false at the end of the stream. Past the end of the exec output is thrown away. */
static bool take(struct exec *e, int i, size_t max)
{
	ssize_t n = read(e->out[i].fd, scratch, max < sizeof scratch ? max : sizeof scratch);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return true;
	if (n <= 0) /* EIO: the last holder of the terminal is gone */
		return false;
	if (!e->ended)
		log_append(&e->log, i + 1, scratch, (size_t)n);
	return true;
}

/* How much may be read without losing what the slowest reader has not got: half of the ring is for what is still in
 * the pipe at the end. */
static size_t hold_room(const struct exec *e)
{
	uint64_t slowest = UINT64_MAX, limit = e->log.tail_max / 2;
	for (const struct stream *s = e->attached; s; s = s->next_attached)
		if (!s->collect && s->position < slowest)
			slowest = s->position;
	if (!e->hold || slowest == UINT64_MAX || slowest > e->log.total)
		return sizeof scratch;
	uint64_t behind = e->log.total - slowest;
	if (behind >= limit)
		return 0;
	return limit - behind < sizeof scratch ? (size_t)(limit - behind) : sizeof scratch;
}

static void hold_release(struct exec *e)
{
	for (int i = 0; i < 2; i++) {
		if (e->held[i] && e->out[i].fd >= 0)
			source_events(&e->out[i], EPOLLIN);
		e->held[i] = false;
	}
}

static void finish(struct exec *e);

static void out_ready(struct exec *e, int i, uint32_t events)
{
	bool was_running = !e->ended;
	size_t room = hold_room(e);
	if (room == 0 && !(events & (EPOLLHUP | EPOLLERR))) { /* all writers gone: what is left fits */
		e->held[i] = true;
		source_events(&e->out[i], 0);
		return;
	}
	if (!take(e, i, room ? room : sizeof scratch)) {
		out_close(e, i);
		if (e->draining)
			finish(e);
	}
	if (was_running)
		readers_touch(e);
}

static void out_first(struct source *s, uint32_t events)
{
	out_ready((struct exec *)((char *)s - offsetof(struct exec, out[0])), 0, events);
}

static void out_second(struct source *s, uint32_t events)
{
	out_ready((struct exec *)((char *)s - offsetof(struct exec, out[1])), 1, events);
}

/* Let the writers of stdin send as much as was taken from the queue since they were last told. */
static void stdin_credit(struct exec *e)
{
	size_t queued = buffer_size(&e->stdin_queue);
	for (struct stream *s = e->attached; s; s = s->next_attached) {
		int64_t owed = (int64_t)WINDOW - s->window - (int64_t)queued;
		/* Small grants wait until they are worth a frame, or until nothing is queued. */
		if (owed <= 0 || (owed < (int64_t)WINDOW / 4 && queued))
			continue;
		struct buffer *b = &s->conn->out;
		uint64_t grant = (uint64_t)owed;
		size_t frame = frame_begin(b, FR_CREDIT, s->id);
		buffer_append(b, &grant, sizeof grant);
		frame_end(b, frame);
		s->window += owed;
		conn_touch(s->conn);
	}
}

/* On a terminal this is a duplicate of the master's descriptor, and output goes on. */
static void in_shut(struct exec *e)
{
	buffer_free(&e->stdin_queue);
	e->stdin_open = false;
	source_close(&e->in);
	stdin_credit(e);
}

static void in_write(struct exec *e)
{
	while (buffer_size(&e->stdin_queue)) {
		ssize_t n = write(e->in.fd, e->stdin_queue.data + e->stdin_queue.start, buffer_size(&e->stdin_queue));
		if (n > 0) {
			buffer_consume(&e->stdin_queue, (size_t)n);
		} else if (errno == EAGAIN) {
			break;
		} else if (errno != EINTR) { /* EPIPE: it has closed its stdin */
			in_shut(e);
			return;
		}
	}
	stdin_credit(e);
	bool left = buffer_size(&e->stdin_queue) > 0;
	if (!left && e->stdin_close)
		in_shut(e);
	else if (left != e->stdin_armed)
		source_events(&e->in, left ? EPOLLOUT : 0);
	e->stdin_armed = left;
}

static void in_ready(struct source *s, uint32_t events)
{
	struct exec *e = (struct exec *)((char *)s - offsetof(struct exec, in));
	if (events & (EPOLLERR | EPOLLHUP))
		in_shut(e);
	else
		in_write(e);
}

void exec_stdin(struct stream *s, const uint8_t *bytes, size_t n)
{
	struct exec *e = s->exec;
	if (e->ended || !e->stdin_open || e->stdin_close) {
		stdin_credit(e);
		return;
	}
	size_t skip = s->skip < n ? (size_t)s->skip : n;
	s->skip -= skip;
	e->stdin_total += n - skip;
	buffer_append(&e->stdin_queue, bytes + skip, n - skip);
	in_write(e);
}

void exec_stdin_end(struct stream *s)
{
	struct exec *e = s->exec;
	if (e->ended || !e->stdin_open || e->stdin_close)
		return;
	if (e->pty)
		buffer_append(&e->stdin_queue, "\4", 1);
	else
		e->stdin_close = true;
	in_write(e);
}

void exec_watch(struct exec *e, int in, int out, int err)
{
	source_add(&e->out[0], out, EPOLLIN, out_first);
	if (err >= 0)
		source_add(&e->out[1], err, EPOLLIN, out_second);
	if (in >= 0 && in == out)
		in = dup(out); /* of its own, so that each has its own interest */
	if (in >= 0)
		source_add(&e->in, in, 0, in_ready);
	e->stdin_open = in >= 0;
}

void exec_put_state(struct buffer *b, const struct exec *e)
{
	if (e->ended && e->start_code) {
		put_string(b, T_START_CODE, e->start_code);
		put_string(b, T_MESSAGE, strerror(e->start_errno));
		put_int(b, T_ERRNO, (uint64_t)e->start_errno);
	} else if (e->ended && WIFSIGNALED(e->status)) {
		put_int(b, T_TERMSIG, (uint64_t)WTERMSIG(e->status));
	} else if (e->ended) {
		put_int(b, T_EXIT_CODE, (uint64_t)WEXITSTATUS(e->status));
	}
	put_int(b, T_TIMED_OUT, e->timed_out);
	put_int(b, T_OOM_KILLED, e->oom_killed);
	put_int(b, T_HOST_SIGNAL, (uint64_t)e->host_signal);
	put_int(b, T_TOTAL, e->log.total);
	put_int(b, T_HEAD_END, e->log.head_size);
	put_int(b, T_TAIL_START, e->log.tail_run_count ? e->log.tail_start : e->log.total);
	put_int(b, T_DURATION_US, e->ended ? e->duration_us : now_us() - e->began_us);
	put_int(b, T_CPU_US, e->cpu_us);
	put_int(b, T_MAXRSS_KIB, (uint64_t)e->max_rss_kib);
	put_int(b, T_BACKGROUND, e->background);
}

void exec_pump(struct stream *s)
{
	struct exec *e = s->exec;
	struct buffer *b = &s->conn->out;
	int which;
	const uint8_t *bytes;
	if (s->collect && !e->ended)
		return;
	while (s->credit > 0 && conn_has_room(s->conn)) {
		size_t n = log_read(&e->log, &s->position, MAX_DATA, &which, &bytes);
		if (n == 0)
			break;
		size_t frame = frame_begin(b, FR_OUTPUT, s->id);
		uint8_t prefix[9] = {(uint8_t)which};
		store_u64(prefix + 1, s->position);
		buffer_append(b, prefix, sizeof prefix);
		buffer_append(b, bytes, n);
		frame_end(b, frame);
		s->credit -= (int64_t)n;
		s->position += n;
	}
	if ((e->held[0] || e->held[1]) && hold_room(e) == sizeof scratch)
		hold_release(e);
	if (!e->ended || !conn_has_room(s->conn) || log_read(&e->log, &s->position, 1, &which, &bytes))
		return;
	size_t frame = frame_begin(b, FR_EXITED, s->id);
	exec_put_state(b, e);
	frame_end(b, frame);
	stream_end(s);
}

void exec_detach(struct stream *s)
{
	struct stream **at = &s->exec->attached;
	while (*at != s)
		at = &(*at)->next_attached;
	*at = s->next_attached;
	if (!s->exec->attached)
		hold_release(s->exec);
	s->exec = NULL;
}

/* Nobody of it is left: its cgroup serves another one. */
static void tree_release(struct exec *e)
{
	if (e->tree && e->tree->exec)
		source_forget(&e->tree->source);
	if (e->tree)
		tree_give(e->tree);
	e->tree = NULL;
	e->background = false;
}

void exec_tree_event(struct source *s, uint32_t events)
{
	(void)events;
	struct tree *t = (struct tree *)((char *)s - offsetof(struct tree, source));
	if (t->exec && tree_is_empty(t))
		tree_release(t->exec);
}

static void finish(struct exec *e)
{
	e->draining = false;
	e->ended = true;
	exec_not_live(e);
	e->duration_us = e->duration_us ? e->duration_us : 1;
	log_trim(&e->log);
	if (e->in.fd >= 0)
		in_shut(e);
	if (!e->tree) { /* all we can tell then is whether somebody still holds its output */
		e->background = e->out[0].fd >= 0 || e->out[1].fd >= 0;
	} else if (tree_is_empty(e->tree)) {
		tree_release(e);
	} else { /* cgroup.events tells when the last one has gone; reading it has armed that */
		e->background = true;
		e->tree->exec = e;
		source_add(&e->tree->source, e->tree->events_fd, EPOLLPRI, exec_tree_event);
	}
	readers_touch(e);
}

/* What is in the pipe now and not more: a background process may fill it faster than it is read. */
static void collect_rest(struct exec *e, int i)
{
	int waiting = 0;
	if (e->out[i].fd < 0 || ioctl(e->out[i].fd, FIONREAD, &waiting) != 0)
		return;
	uint64_t end = e->log.total + (uint64_t)(waiting > 0 ? waiting : 0);
	bool open = true;
	while (open && e->log.total < end)
		open = take(e, i, (size_t)(end - e->log.total));
	if (!open || !take(e, i, sizeof scratch))
		out_close(e, i);
}

void exec_reaped(struct exec *e, int status, const void *rusage)
{
	const struct rusage *u = rusage;
	if (slots[e->slot].step) {
		e->start_code = child_step_code(slots[e->slot].step, slots[e->slot].error);
		e->start_errno = slots[e->slot].error;
	}
	exec_slot_free(e);
	e->reaped = true;
	e->status = status;
	oom_judge(e);
	e->duration_us = now_us() - e->began_us;
	if (u) {
		e->cpu_us = (uint64_t)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) * 1000000u +
		            (uint64_t)(u->ru_utime.tv_usec + u->ru_stime.tv_usec);
		e->max_rss_kib = u->ru_maxrss;
	}
	e->hold = false;
	hold_release(e);
	if (e->timed_out)
		tree_signal(e->tree, e->pid, SIGKILL); /* those that it forked while the first kill ran its course */
	for (int i = 0; i < 2 && !e->pty; i++)
		collect_rest(e, i);
	if (e->pty && e->out[0].fd >= 0) {
		e->draining = true;
		e->drain_until_us = now_us() + PTY_DRAIN_US;
	} else {
		finish(e);
	}
	readers_touch(e);
}

uint64_t execs_deadline(void)
{
	uint64_t next = UINT64_MAX;
	for (struct exec *e = execs_live; e; e = e->next_live) {
		uint64_t at = e->draining ? e->drain_until_us : e->timed_out ? UINT64_MAX : e->deadline_us;
		if (at < next)
			next = at;
	}
	return next;
}

void execs_tick(void)
{
	struct exec *next;
	if (execs_deadline() > now_us())
		return;
	for (struct exec *e = execs_live; e; e = next) {
		next = e->next_live; /* an end takes it from the list */
		if (e->draining && now_us() >= e->drain_until_us) {
			finish(e);
		} else if (!e->draining && !e->timed_out && now_us() >= e->deadline_us) {
			e->timed_out = true;
			tree_signal(e->tree, e->pid, SIGKILL);
		}
	}
}
