/* A lane: PID 1 of a sandbox in which stateless calls run, one at a time (backends/fncall/lane_wire.py is its peer).
 *
 * Each call gets new pid, mount, IPC and UTS namespaces, held by a reaper (their PID 1) that is made before the call is
 * known. The program is PID 2 with nobody's ids and no capability; the reaper's death is the death of all of it.
 *
 * One SOCK_SEQPACKET socket to the node, little endian structs as below. A message is struct call_request, then
 * payload: argv, env (NUL-ended strings), fetch names (NUL-ended), stdin bytes, files (struct call_file, name, data); or
 * the payload is in a passed memfd. Descriptors come in this order, each if its flag says so: payload, stdin, exec. */
#ifndef DSEC_CALL_H
#define DSEC_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "init.h"

#define CALL_MAGIC 0x4c414344u /* "DCAL" */
#define CALL_INLINE_MAX (96u * 1024)
#define CALL_USER 65534 /* nobody, in the user namespace of the lane */
#define CALL_WORK "/tmp/work"
#define CALL_WORDS_MAX 8192u
#define CALL_FILES_MAX 1024u
#define CALL_NAME_ROOM 4096u /* of a file's name, its end included */

enum call_type { CALL_SETUP = 1, CALL_RUN = 2, CALL_CANCEL = 3 };

/* request flags */
#define CALL_ZYGOTE 1u     /* the zygote forks it: argv[0] is the source file in the work directory */
#define CALL_PAYLOAD_FD 2u
#define CALL_STDIN_FD 4u   /* else stdin is in the payload, or /dev/null */
#define CALL_EXEC_FD 8u    /* run this descriptor; argv[0] is only a name */
#define CALL_PROBE 16u     /* try the forbidden instead of running a program */

struct call_request {
	uint32_t magic, type;
	uint64_t id;
	uint64_t wall_us, cpu_us, output_bytes, disk_bytes, stack_bytes, fetch_bytes;
	uint64_t payload_bytes, stdin_bytes;
	uint32_t flags, nofile, argc, envc, filec, fetchc;
};

struct call_file {
	uint32_t name_bytes, mode; /* in a reply: mode holds the errno of a file that could not be fetched */
	uint64_t size;
};

/* reply flags */
#define CALL_WALL_OVER 1u
#define CALL_CPU_OVER 2u
#define CALL_OUT_OVER 4u
#define CALL_ERR_OVER 8u
#define CALL_CANCELLED 16u
#define CALL_BROKEN 32u      /* the lane can run nothing more */
#define CALL_BODY_FD 64u     /* out, err and files are in a passed memfd */
#define CALL_NOT_STARTED 128u /* step and error say why; nothing of the program ran */
#define CALL_NO_ZYGOTE 256u

enum call_step { STEP_NONE, STEP_FILES, STEP_SLOT, STEP_FORK, STEP_ENTER, STEP_LIMITS, STEP_USER, STEP_EXEC, STEP_ZYGOTE,
		 STEP_REQUEST };

struct call_reply {
	uint32_t magic, flags;
	uint64_t id;
	uint32_t step, error;
	uint32_t status; /* as of wait(2) */
	uint32_t filec;
	uint64_t wall_us, cpu_us, maxrss_kib, oom_kills, memory_bytes;
	uint64_t major_faults; /* of the program and the children that it waited for */
	uint64_t held_bytes;   /* charged to the lane when a limit of time was passed, else 0 */
	uint64_t out_bytes, err_bytes, files_bytes;
};

struct call_slot {
	pid_t reaper; /* 0: none */
	int pidfd, work_fd;
	uint64_t disk_bytes;
};

/* A request as it came: pointers into its payload. */
struct call {
	struct call_request r;
	char **argv, **envp, **fetch;
	const uint8_t *words_end, *stdin_at, *files_at, *end; /* words_end: behind argv and env */
	int stdin_fd, exec_fd;
	uint8_t *mapped; /* the payload when it came in a memfd */
};

struct bytes {
	uint8_t *at;
	size_t size, capacity;
	bool failed;
};
bool bytes_add(struct bytes *b, const void *data, size_t n);
uint8_t *bytes_room(struct bytes *b, size_t n); /* NULL: no memory */
void bytes_free(struct bytes *b);

/* call.c */
int lane_serve(const struct init_options *o); /* until the node closes its end */
uint64_t call_now_us(void);

/* call_parse.c */
bool call_parse(struct call *c, const uint8_t *at, size_t size, const int *fds, int count); /* false: it is none */
bool call_next_file(const struct call *c, const uint8_t **at, struct call_file *f, const uint8_t **name,
		    const uint8_t **data); /* from files_at on; false: it is not what its header says */
void call_free(struct call *c, int *fds, int count);

/* call_slot.c */
bool slot_make(struct call_slot *s, uint64_t disk_bytes); /* false: errno */
bool slot_end(struct call_slot *s); /* kill and reap; false when it would not die */

/* call_run.c: the program of one call, from start to the death of its tree */
struct call_meters {
	int cpu_fd, oom_fd, memory_fd;
};
uint64_t meter_cpu_us(const struct call_meters *m);
uint64_t meter_oom_kills(const struct call_meters *m);
uint64_t meter_memory(const struct call_meters *m);
void call_run(struct call *c, struct call_slot *slot, const struct call_meters *m, int control, int zygote,
	      struct call_reply *reply, struct bytes *out, struct bytes *err);

/* call_child.c */
struct call_report { /* shared with the child */
	uint32_t step, error;
};
struct call_start {
	const struct call *call;
	const struct call_slot *slot;
	int in, out, err;
	struct call_report *report;
};
_Noreturn void call_child(const struct call_start *s);
pid_t call_fork(const struct call_start *s, int *pidfd); /* -1: errno */
void drop_all_caps(bool bounding);

/* call_files.c */
int files_put(int dir, const struct call *c);		     /* 0 or errno */
uint32_t files_fetch(int dir, const struct call *c, struct bytes *out); /* number of records */

/* call_zygote.c: the socket to the interpreter that forks calls */
pid_t zygote_start(const struct call *c, int *sock); /* 0: there is none */
bool zygote_ask(int sock, const struct call *c, const struct call_slot *slot, int in, int out, int err);
struct zygote_report {
	uint32_t status, step, error, major_faults;
	uint64_t maxrss_kib;
};
bool zygote_report(int sock, struct zygote_report *r); /* waits */

/* call_probe.c: exit status 0 when all that is forbidden was denied, else the number of the first that was not */
int call_probe(void);

#endif
