/* The table of execs and the verbs on it. Pipes, output and the end of an exec are in execio.c. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

#define LOG_BYTES (64u * 1024 * 1024)
#define OUTPUT_MAX (64u * 1024 * 1024)
#define RLIMITS_MAX 16
#define LIST_PIECE (32u * 1024)
#define BUCKETS 256u

struct exec *execs, *execs_live;
static struct exec *by_id[BUCKETS];
static unsigned known;
struct slot *slots;
struct budget log_budget;
static bool slot_used[EXEC_LIVE_MAX];

static bool evict_oldest(void *context)
{
	(void)context;
	struct exec *oldest = NULL;
	for (struct exec *e = execs; e; e = e->next)
		if (e->ended && !e->attached && (e->log.head_capacity || e->log.tail_capacity))
			oldest = e;
	if (oldest)
		log_drop(&oldest->log);
	return oldest != NULL;
}

void execs_init(uint64_t log_bytes)
{
	log_budget = (struct budget){.limit = log_bytes ? log_bytes : LOG_BYTES, .evict = evict_oldest};
	slots = mmap(NULL, EXEC_LIVE_MAX * sizeof *slots, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (slots == MAP_FAILED)
		abort();
	ends_init();
}

/* FNV-1a. Who chooses ids that all fall into one bucket walks as far as there are execs, in a sandbox of its own. */
static struct exec **bucket_of(const void *id, size_t size)
{
	uint32_t hash = 2166136261u;
	for (size_t i = 0; i < size; i++)
		hash = (hash ^ ((const uint8_t *)id)[i]) * 16777619u;
	return &by_id[(hash ^ hash >> 16) % BUCKETS];
}

struct exec *exec_find(const uint8_t *id, size_t size)
{
	for (struct exec *e = *bucket_of(id, size); e; e = e->next_same)
		if (strlen(e->id) == size && memcmp(e->id, id, size) == 0)
			return e;
	return NULL;
}

void exec_not_live(struct exec *e)
{
	struct exec **at = &execs_live;
	while (*at && *at != e)
		at = &(*at)->next_live;
	if (*at)
		*at = e->next_live;
}

void exec_free(struct exec *e)
{
	struct exec **at = &execs, **same = bucket_of(e->id, strlen(e->id));
	while (*at != e)
		at = &(*at)->next;
	*at = e->next;
	while (*same != e)
		same = &(*same)->next_same;
	*same = e->next_same;
	known--;
	source_close(&e->in);
	source_close(&e->out[0]);
	source_close(&e->out[1]);
	buffer_free(&e->stdin_queue);
	log_drop(&e->log);
	loop_free_later(e);
}

/* Forgets the oldest ended one that nothing hangs on, if there are EXEC_KEEP; true while there are still more. */
static bool forget_one(unsigned *live, unsigned *background)
{
	unsigned ended = 0;
	struct exec *oldest = NULL;
	*live = *background = 0;
	for (struct exec *e = execs; e; e = e->next) {
		*live += !e->ended;
		*background += e->ended && e->background;
		if (e->ended && !e->background && !e->attached) {
			ended++;
			oldest = e;
		}
	}
	if (ended >= EXEC_KEEP)
		exec_free(oldest);
	return ended > EXEC_KEEP;
}

bool exec_make_room(void)
{
	unsigned live, background;
	if (known < EXEC_KEEP)
		return true;
	while (forget_one(&live, &background)) /* several, when many background processes have ended at once */
		;
	return live < EXEC_LIVE_MAX && background < EXEC_BACKGROUND_MAX;
}

static bool good_id(struct span id)
{
	if (id.size == 0 || id.size > 64)
		return false;
	for (size_t i = 0; i < id.size; i++) {
		uint8_t c = id.at[i];
		bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
		if (!letter && c != '_' && c != '-')
			return false;
	}
	return true;
}

/* Name of the field that makes an EXEC impossible, NULL when all is well. */
static const char *exec_check(struct span payload)
{
	struct field f;
	unsigned argc = 0, limits = 0;
	while (field_next(&payload, &f) == PARSE_OK) {
		bool string = f.tag == T_ARGV || f.tag == T_ENV || f.tag == T_CWD || f.tag == T_USER;
		if (string && memchr(f.value.at, 0, f.value.size))
			return field_name(f.tag);
		if (f.tag == T_ARGV && argc++ == 0 && f.value.size == 0)
			return "argv";
		if (f.tag == T_CWD && (f.value.size == 0 || f.value.at[0] != '/' || f.value.size > 4095))
			return "cwd";
		if (f.tag == T_RLIMIT && (f.value.size != 20 || ++limits > RLIMITS_MAX))
			return "rlimit";
		if (f.tag == T_MAX_OUTPUT && load_u64(f.value.at) > OUTPUT_MAX)
			return "max_output";
		if (f.tag == T_PTY && load_u64(f.value.at) > UINT32_MAX)
			return "pty";
	}
	return argc ? NULL : "argv";
}

static void put_started(struct stream *s, bool attached)
{
	if (s->collect)
		return; /* it waits for the end only; spare it a wake-up */
	struct buffer *b = &s->conn->out;
	size_t frame = frame_begin(b, FR_STARTED, s->id);
	put_int(b, T_PID, (uint64_t)s->exec->pid);
	put_int(b, T_ATTACHED, attached);
	frame_end(b, frame);
	conn_touch(s->conn);
}

static void attach(struct conn *c, uint32_t id, struct exec *e, struct span payload, bool attached)
{
	unsigned count = 0;
	for (struct stream *s = e->attached; s; s = s->next_attached)
		count++;
	uint64_t since = field_int(payload, T_SINCE, 0), credit = field_int(payload, T_CREDIT, WINDOW);
	if (since > e->log.total) {
		reply_error(c, id, "bad_field", "since", 0, "beyond the end of the output");
		return;
	}
	if (count >= EXEC_ATTACH_MAX) {
		reply_error(c, id, "busy", NULL, 0, "too many readers of this exec");
		return;
	}
	struct stream *s = stream_new(c, id);
	if (!s)
		return;
	s->exec = e;
	s->next_attached = e->attached;
	e->attached = s;
	s->position = since;
	s->credit = (int64_t)(credit < INT64_MAX / 4 ? credit : INT64_MAX / 4);
	s->collect = field_int(payload, T_COLLECT, 0) != 0;
	put_started(s, attached);
	conn_touch(c);
}

static void start(struct exec *e, struct span payload, const struct ends *ends)
{
	bool inside;
	struct start s = {
	    .payload = payload,
	    .in = ends->child_in,
	    .out = ends->child_out,
	    .err = ends->child_err,
	    .pty = e->pty,
	    .no_new_privs = field_int(payload, T_NO_NEW_PRIVS, 1) || (options.flags & INIT_NO_NEW_PRIVS),
	    .cgroup_procs_fd = -1,
	    .slot = &slots[e->slot],
	};
	e->pid = fork_into(e->tree, &inside);
	if (e->pid == 0) {
		if (e->tree && !inside)
			s.cgroup_procs_fd = openat(e->tree->dir_fd, "cgroup.procs", O_WRONLY | O_CLOEXEC);
		child_exec(&s);
	}
}

static struct exec *exec_new(struct span id, struct span payload)
{
	struct exec *e = calloc(1, sizeof *e);
	if (!e)
		return NULL;
	memcpy(e->id, id.at, id.size);
	e->in.fd = e->out[0].fd = e->out[1].fd = -1;
	for (e->slot = 0; slot_used[e->slot];)
		e->slot++;
	slot_used[e->slot] = true;
	slots[e->slot] = (struct slot){0};
	e->pty = field_int(payload, T_PTY, 0) != 0;
	e->hold = field_int(payload, T_HOLD, 0) != 0;
	e->began_us = now_us();
	oom_begin(e);
	uint64_t timeout_ms = field_int(payload, T_TIMEOUT_MS, 0);
	e->deadline_us = timeout_ms && timeout_ms < UINT64_MAX / 4000 ? e->began_us + timeout_ms * 1000 : UINT64_MAX;
	log_init(&e->log, &log_budget, field_int(payload, T_MAX_OUTPUT, 1024 * 1024));
	struct exec **same = bucket_of(e->id, id.size);
	e->next_same = *same;
	*same = e;
	e->next_live = execs_live;
	execs_live = e;
	e->next = execs;
	execs = e;
	known++;
	return e;
}

void exec_slot_free(struct exec *e)
{
	slot_used[e->slot] = false;
	e->slot = -1;
}

void exec_request(struct conn *c, uint32_t stream, struct span payload)
{
	struct span id = {0};
	field_find(payload, T_EXEC_ID, &id);
	const char *field = good_id(id) ? exec_check(payload) : "exec_id";
	if (field) {
		reply_error(c, stream, "bad_field", field, 0, "missing, malformed or out of bounds");
		return;
	}
	struct exec *e = exec_find(id.at, id.size);
	if (e) { /* its sender did not hear of it: what it gives as stdin begins at the beginning again */
		attach(c, stream, e, payload, true);
		struct stream *s = stream_find(c, stream);
		if (s)
			s->skip = e->stdin_total;
		return;
	}
	e = exec_make_room() ? exec_new(id, payload) : NULL;
	if (!e) {
		reply_error(c, stream, "busy", NULL, 0, "too many execs are running, or left processes behind");
		return;
	}
	struct ends ends = {-1, -1, -1, -1, -1, -1};
	bool opened = ends_open(&ends, payload);
	int error = opened ? 0 : errno;
	if (opened && trees_exact() && !(e->tree = tree_take()))
		error = EAGAIN;
	if (error == 0) {
		start(e, payload, &ends);
		error = e->pid < 0 ? errno : 0;
	}
	close_all(ends.child_in, ends.child_out, ends.child_err);
	if (error) {
		close_all(ends.in, ends.out, ends.err);
		e->start_code = e->pty && !opened ? "pty_failed" : child_step_code(0, error);
		e->start_errno = error;
		exec_reaped(e, 0, NULL);
	} else {
		exec_watch(e, ends.in, ends.out, ends.err);
	}
	attach(c, stream, e, payload, false);
}

/* The exec that a request names, or NULL after an ERROR. */
static struct exec *named(struct conn *c, uint32_t stream, struct span payload)
{
	struct span id = {0};
	struct exec *e = field_find(payload, T_EXEC_ID, &id) ? exec_find(id.at, id.size) : NULL;
	if (!e)
		reply_error(c, stream, "unknown_exec", "exec_id", 0, "no exec of that id is known (any more)");
	return e;
}

void exec_attach(struct conn *c, uint32_t stream, struct span payload)
{
	struct exec *e = named(c, stream, payload);
	if (e)
		attach(c, stream, e, payload, true);
}

void exec_signal(struct conn *c, uint32_t stream, struct span payload)
{
	struct exec *e = named(c, stream, payload);
	uint64_t signum = field_int(payload, T_SIGNUM, 0);
	bool whole = field_int(payload, T_TREE, 1) != 0;
	if (!e)
		return;
	if (signum < 1 || signum > 64) {
		reply_error(c, stream, "bad_field", "signum", 0, "1 to 64");
		return;
	}
	if (!e->ended)
		e->host_signal = (int)signum;
	if (whole && (!e->reaped || e->tree))
		tree_signal(e->tree, e->pid, (int)signum);
	else if (!e->reaped)
		kill(e->pid, (int)signum);
	reply_ok(c, stream);
}

void exec_resize(struct conn *c, uint32_t stream, struct span payload)
{
	struct exec *e = named(c, stream, payload);
	uint64_t size = field_int(payload, T_PTY, 0);
	struct winsize w = {.ws_row = (unsigned short)(size >> 16), .ws_col = (unsigned short)size};
	if (!e)
		return;
	if (!e->pty || size > UINT32_MAX || (e->out[0].fd >= 0 && ioctl(e->out[0].fd, TIOCSWINSZ, &w) != 0))
		reply_error(c, stream, "bad_field", "pty", 0, "it has no terminal, or that is no size of one");
	else
		reply_ok(c, stream);
}

void exec_forget(struct conn *c, uint32_t stream, struct span payload)
{
	struct exec *e = named(c, stream, payload);
	if (!e)
		return;
	if (!e->ended || e->background || e->attached) {
		reply_error(c, stream, "exec_running", "exec_id", 0, "it, its background processes or its readers are still there");
		return;
	}
	exec_free(e);
	reply_ok(c, stream);
}

void exec_list(struct conn *c, uint32_t stream, struct span payload)
{
	struct span id = {0};
	bool one = field_find(payload, T_EXEC_ID, &id);
	struct buffer *b = &c->out;
	size_t frame = frame_begin(b, FR_ITEM, stream), began = buffer_size(b);
	for (struct exec *e = execs; e; e = e->next) {
		if (one && (strlen(e->id) != id.size || memcmp(e->id, id.at, id.size) != 0))
			continue;
		if (buffer_size(b) - began > LIST_PIECE) {
			frame_end(b, frame);
			frame = frame_begin(b, FR_ITEM, stream);
			began = buffer_size(b);
		}
		size_t entry = nest_begin(b, T_ENTRY);
		put_string(b, T_EXEC_ID, e->id);
		put_int(b, T_RUNNING, !e->ended);
		put_int(b, T_PID, (uint64_t)e->pid);
		exec_put_state(b, e);
		nest_end(b, entry);
	}
	frame_end(b, frame);
	reply_ok(c, stream);
}
