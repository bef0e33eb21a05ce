/* The pieces of a serving dsec-init and who may touch them. One thread; everything hangs off one epoll loop. */
#ifndef DSEC_STATE_H
#define DSEC_STATE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"
#include "init.h"
#include "log.h"

#define CONN_MAX 32
#define CONN_STREAMS_MAX 2048
#define OUT_HIGH (256u * 1024)	   /* a connection's queue beyond which nothing more is pulled for it */
#define OUT_FULL (4u * 1024 * 1024) /* beyond which no more requests are read from it */
#define EXEC_LIVE_MAX 512
#define EXEC_KEEP 320 /* ended ones remembered */
#define EXEC_BACKGROUND_MAX 1024
#define EXEC_ATTACH_MAX 8
#define WORKER_MAX 64
#define WATCH_MAX 32

/* ---- loop.c: epoll, children, time ---- */
struct source {
	void (*ready)(struct source *s, uint32_t events);
	int fd; /* -1: not watched */
};
void source_add(struct source *s, int fd, uint32_t events, void (*ready)(struct source *, uint32_t));
void source_events(struct source *s, uint32_t events);
void source_forget(struct source *s); /* unwatch */
void source_close(struct source *s); /* unwatch and close(2) */
void loop_free_later(void *memory);  /* events of this round may still point to it */
uint64_t now_us(void);		     /* CLOCK_MONOTONIC, less the time that we were frozen */
void loop_stop(int status);
extern uint8_t scratch[MAX_DATA + HEADER_SIZE];

/* ---- conn.c: connections and their streams ---- */
struct conn;
struct exec;
struct worker;

struct stream {
	struct conn *conn;
	uint32_t id;
	struct stream *next;	      /* of the same bucket */
	struct exec *exec;	      /* either attached to an exec ... */
	struct stream *next_attached;
	uint64_t position;	      /* next offset of its log to send */
	int64_t credit;
	bool collect;
	int64_t window;		      /* stdin bytes that the host may still send */
	uint64_t skip;		      /* stdin bytes of a repeated EXEC that the program has got already */
	struct worker *worker;	      /* ... or served by a worker */
	bool paused;		      /* the worker's socket is not read: the connection is full */
};

struct conn {
	struct source source;
	struct conn *next;
	struct buffer in, out;
	struct stream *streams[32];
	unsigned stream_count;
	uint32_t events;
	uint64_t parked_until_us; /* permanent, and nobody on the other side: not watched */
	bool greeted, permanent, closing, doomed, dirty;
};

void conn_accept(struct source *listener, uint32_t events);
struct conn *conn_open(int fd, bool permanent);
void conns_flush(void); /* at the end of each round: pump what became sendable, write */
void conn_touch(struct conn *c);
uint64_t conns_deadline(void);
void conns_tick(void);
struct stream *stream_new(struct conn *c, uint32_t id); /* NULL: an ERROR was sent */
struct stream *stream_find(struct conn *c, uint32_t id);
void streams_drop(struct conn *c);
void stream_end(struct stream *s); /* unlink and free; detaches from exec or worker */
void reply_ok(struct conn *c, uint32_t stream);
void reply_error(struct conn *c, uint32_t stream, const char *code, const char *field, int error, const char *message);
static inline bool conn_has_room(const struct conn *c) { return buffer_size(&c->out) < OUT_HIGH; }

/* ---- tree.c: the processes of one exec as a cgroup ---- */
struct tree {
	int dir_fd, events_fd;
	unsigned number;
	bool killed; /* by cgroup.kill: never used again, see tree_give */
	struct tree *next;
	struct source source; /* while only background processes are left */
	struct exec *exec;
};
void trees_init(int cgroup_fd);
bool trees_exact(void);
struct tree *tree_take(void); /* empty; NULL: none can be made */
void tree_give(struct tree *t);
bool tree_is_empty(const struct tree *t);
/* t NULL: walk /proc by session and parent, which misses a process that left both. */
void tree_signal(struct tree *t, pid_t leader, int signum);

/* ---- exec.c (verbs, table), execio.c (pipes, output, end) ---- */
struct exec {
	char id[65];
	pid_t pid;
	bool ended, reaped, timed_out, oom_killed, background, pty, stdin_open, stdin_armed, stdin_close, draining;
	bool hold, held[2]; /* a slow reader holds the program up; which of its outputs are not read now */
	int host_signal, status, slot;
	struct source in, out[2];
	struct exec *next, *next_live, *next_same; /* of all, of those that have not ended, of those in its bucket of ids */
	struct tree *tree;
	struct log log;
	struct buffer stdin_queue;
	struct stream *attached;
	uint64_t oom_before, oom_others; /* oom.c */
	uint64_t stdin_total, deadline_us, began_us, duration_us, cpu_us, drain_until_us;
	long max_rss_kib;
	const char *start_code;
	int start_errno;
};
extern struct exec *execs; /* newest first */
extern struct exec *execs_live; /* those that have not ended, newest first: walked at each turn of the loop */
extern struct budget log_budget;
void exec_request(struct conn *c, uint32_t stream, struct span payload);
void exec_attach(struct conn *c, uint32_t stream, struct span payload);
void exec_signal(struct conn *c, uint32_t stream, struct span payload);
void exec_resize(struct conn *c, uint32_t stream, struct span payload);
void exec_list(struct conn *c, uint32_t stream, struct span payload);
void exec_forget(struct conn *c, uint32_t stream, struct span payload);
struct exec *exec_find(const uint8_t *id, size_t size);
void exec_free(struct exec *e);
void exec_not_live(struct exec *e);
void execs_init(uint64_t log_bytes);
void exec_slot_free(struct exec *e);
bool exec_make_room(void); /* for one more; forgets the oldest ended ones */

void exec_watch(struct exec *e, int in, int out, int err);
void exec_stdin(struct stream *s, const uint8_t *bytes, size_t n);
void exec_stdin_end(struct stream *s);
void exec_pump(struct stream *s); /* output and end to one attached stream */
void exec_reaped(struct exec *e, int status, const void *rusage);
void exec_detach(struct stream *s);
void exec_put_state(struct buffer *b, const struct exec *e);
void exec_tree_event(struct source *s, uint32_t events);
uint64_t execs_deadline(void); /* next time that execs_tick has something to do; UINT64_MAX: none */
void execs_tick(void);

/* ---- oom.c: whether the kernel killed an exec for memory ---- */
void oom_begin(struct exec *e);
void oom_judge(struct exec *e); /* when it has been reaped */

/* ---- ends.c: the two ends of an exec's streams; -1 where there is none ---- */
struct ends {
	int in, out, err, child_in, child_out, child_err;
};
void ends_init(void);
bool ends_open(struct ends *ends, struct span exec_payload);
void close_all(int a, int b, int c); /* each once, whichever are the same or -1 */

/* ---- child.c: between fork and exec ---- */
struct slot {
	int step, error;
};
extern struct slot *slots; /* shared with children, [EXEC_LIVE_MAX]; a child that fails before exec writes its own */
struct start {
	struct span payload;
	int in, out, err; /* become 0, 1, 2 */
	bool pty, no_new_privs;
	int cgroup_procs_fd; /* -1, or where to enter the cgroup when clone3 could not */
	struct slot *slot;
};
_Noreturn void child_exec(const struct start *s);
const char *child_step_code(int step, int error);
/* Root, or `user` as EXEC has it, with the capabilities of execs plus `keep`. 0, or -errno (ENOENT: unknown user). */
int become_user(struct span user, uint64_t keep);
/* Signals, umask and oom score as a program expects them. */
void child_reset(void);
/* Down to the priority of programs, for good: PID 1 and its file workers run before all of them, see OP_NICE. */
void child_level(void);
pid_t fork_into(const struct tree *t, bool *inside);
extern struct init_options options;

/* ---- worker.c: one process for one file verb ---- */
bool worker_start(struct conn *c, const struct header *h, struct span payload);
void worker_frame(struct stream *s, const struct header *h, const uint8_t *payload);
void worker_detach(struct stream *s);
void worker_resume(struct stream *s);
bool worker_reaped(pid_t pid);
uint64_t workers_deadline(void);
void workers_tick(void);

#endif
