/* The native launcher: a list of operations as data (written by backends/container/plan.py) carried out by C.
 *
 * Wire form of a list, little endian, in a memfd:
 *   header   u32 magic, u16 version, u16 op count, u32 bytes of all operations, u32 offset of the report
 *   op       u16 code, u16 field count, u32 bytes of its fields
 *   field    u8 kind (NUMBER, STRING, BLOB), 3 zero bytes, u32 length, data padded to 8 bytes
 * NUMBER has length 8; STRING ends in one NUL, holds no other and counts it. The report (struct report) follows the
 * operations in the same memfd, is written by the process that carries them out and read by the host.
 */
#ifndef DSEC_LAUNCH_H
#define DSEC_LAUNCH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* openat2, clone3, fsopen: include this header first */
#endif

#include <stddef.h>
#include <stdint.h>

#define PLAN_MAGIC 0x504c5344u /* "DSLP" */
#define PLAN_VERSION 1u
#define PLAN_MAX_OPS 512u
#define PLAN_MAX_BYTES (4u << 20)
#define PLAN_MAX_FIELDS 8u
#define LAUNCH_MAX_FDS 64

enum field_kind { FIELD_NUMBER = 1, FIELD_STRING = 2, FIELD_BLOB = 3 };

struct field {
	uint64_t number;
	const char *data;
	uint32_t length; /* without the NUL for strings */
};

struct op {
	uint32_t code;
	uint32_t nfields;
	struct field f[PLAN_MAX_FIELDS];
};

struct plan {
	const uint8_t *ops;
	size_t ops_bytes;
	size_t cursor;
	uint32_t op_count;
	uint32_t report_offset;
};

/* What happened, for the host. us[i]: microseconds from the request's arrival to the end of operation i. */
struct report {
	uint32_t done;   /* operations carried out */
	int32_t error;   /* errno of operation `done` when it failed, else 0 */
	char detail[56]; /* what in it failed, such as the path or the syscall */
	uint32_t us[PLAN_MAX_OPS];
};

/* State while a list is carried out. Descriptors are -1 until an operation makes them. */
struct launch {
	int fds[LAUNCH_MAX_FDS]; /* passed by the host; operations name them by index */
	int nfds;
	int userns_fd;
	int root_fd;    /* O_PATH on the sandbox's root mount */
	int upper_fd;   /* the mount that holds upper/ and work/ */
	int sysctl_fd;  /* O_PATH on sys/ of the sandbox's own proc, from below the read-only bind */
	int landlock_fd;
	int listen_fd;
	int cgroup_fd;
	int oom_fd;
	uint64_t uid_base;
	uint64_t exec_caps;
	uint32_t exec_flags;
	uint64_t log_bytes;
	const char *detail;
};

/* Where the launcher process keeps mount sources: a private tmpfs root, see launch.c. */
#define SCRATCH_LOWER "/lower"
#define SCRATCH_UPPER "/upper"
#define LAYER_UPPER "upper"
#define LAYER_WORK "work"
#define SCRATCH_ROOT "/root"
#define SCRATCH_NULL "/null"
#define SCRATCH_EMPTY "/empty"

/* launch_plan.c: 0, or -1 with *why set. Everything is checked before anything is done. */
int plan_open(struct plan *p, const uint8_t *bytes, size_t size, const char **why);
int plan_next(struct plan *p, struct op *op); /* 1, or 0 at the end */

/* launch_ops.c: the table of operations. */
struct op_kind {
	uint32_t code;
	const char *signature; /* n number, s string, b blob */
	int (*run)(struct launch *l, const struct op *op); /* NULL: carried out by the spawner before the clone */
};
const struct op_kind *op_kind_of(uint32_t code);

enum op_code {
	OP_USERNS = 1,       /* n uid base, n count */
	OP_CLONE = 2,        /* n namespace flags, n fd of the cgroup2 directory or NO_FD */
	OP_CGROUP = 3,       /* n fd of a cgroup.procs */
	OP_UNSHARE = 4,      /* n namespace flags */
	OP_SETNS = 5,        /* n fd, n namespace type */
	OP_HOSTNAME = 6,     /* s */
	OP_TMPFS_UPPER = 7,  /* n bytes, n inodes */
	OP_IDMAP = 8,        /* n fd of a detached mount */
	OP_OVERLAY = 9,      /* n fd of the detached lower mount, n mount attributes; needs one of the uppers before */
	OP_MOUNT = 10,       /* s type, s target, s options "k=v\x1fk", n attributes, n mode of a made target, n may follow links */
	OP_MKNOD = 11,       /* s path, n mode, n major, n minor */
	OP_SYMLINK = 12,     /* s path, s text */
	OP_BIND = 13,        /* n fd of a detached mount, s target, n attributes to set */
	OP_MASK = 14,        /* s path */
	OP_READONLY = 15,    /* s path, n must exist, n attributes to set */
	OP_ROOT = 16,        /* - */
	OP_RLIMIT = 17,      /* n resource, n soft, n hard */
	OP_OOM_SCORE = 18,   /* n score + 1000 */
	OP_ENTER_USERNS = 19,/* - */
	OP_SYSCTL = 20,      /* s name with '/', s value */
	OP_FILE = 21,        /* s path, b content, n mode, n how (1: replace what is there; from bit 8 on its owner inside) */
	OP_REMOUNT = 22,     /* s path of a mount, n attributes to set */
	OP_LANDLOCK = 23,    /* n handled fs, n handled net, n scopes */
	OP_LANDLOCK_PATH = 24, /* s path, n allowed */
	OP_LANDLOCK_SELF = 25, /* - */
	OP_NO_NEW_PRIVS = 26,  /* - */
	OP_CAPS = 27,        /* n PID 1's mask, n execs' mask */
	OP_SECCOMP = 28,     /* b struct sock_filter[] */
	OP_PIN = 29,         /* s path: no component of it can be renamed or removed inside */
	OP_SERVE = 30,       /* n fd of the listener, n fd of the cgroup2 directory or NO_FD, n flags for execs, n bytes for
	                      * their output logs, n fd of the file that counts OOM kills or NO_FD */
	OP_DISK_UPPER = 31,  /* n fd of a detached mount that holds upper/ and work/ */
	OP_NICE = 32,        /* n nice value + 20 of PID 1 (setpriority(2)); programs start at 0 again */
};
#define NO_FD 0xffffffffu

/* launch_mount.c, launch_files.c */
int op_tmpfs_upper(struct launch *l, const struct op *op);
int op_disk_upper(struct launch *l, const struct op *op);
int op_idmap(struct launch *l, const struct op *op);
int op_overlay(struct launch *l, const struct op *op);
int op_mount(struct launch *l, const struct op *op);
int op_mknod(struct launch *l, const struct op *op);
int op_symlink(struct launch *l, const struct op *op);
int op_bind(struct launch *l, const struct op *op);
int op_mask(struct launch *l, const struct op *op);
int op_readonly(struct launch *l, const struct op *op);
int op_remount(struct launch *l, const struct op *op);
int op_root(struct launch *l, const struct op *op);
int op_file(struct launch *l, const struct op *op);
int op_pin(struct launch *l, const struct op *op);

/* launch_lock.c */
int op_rlimit(struct launch *l, const struct op *op);
int op_oom_score(struct launch *l, const struct op *op);
int op_nice(struct launch *l, const struct op *op);
int op_enter_userns(struct launch *l, const struct op *op);
int op_sysctl(struct launch *l, const struct op *op);
int op_landlock(struct launch *l, const struct op *op);
int op_landlock_path(struct launch *l, const struct op *op);
int op_landlock_self(struct launch *l, const struct op *op);
int op_no_new_privs(struct launch *l, const struct op *op);
int op_caps(struct launch *l, const struct op *op);
int op_seccomp(struct launch *l, const struct op *op);

/* launch_path.c: paths inside the sandbox, resolved by the kernel below root_fd; descriptors are O_PATH. */
int root_open(struct launch *l, const char *path, uint64_t flags, uint64_t resolve);
int root_open_parent(struct launch *l, const char *path, const char **name);
int root_make(struct launch *l, const char *path, uint32_t mode, int want_file);
int launch_fd(struct launch *l, uint64_t index); /* a passed descriptor, or -1 with EBADF */
int launch_close(int fd, int result); /* closes fd, keeps errno, returns result */
int launch_fail(struct launch *l, const char *what); /* notes what failed; always -1 and keeps errno */

/* launch.c: carry out every operation that is not the spawner's; returns 0 or -1 with the report filled. */
int carry_out(struct launch *l, struct plan *p, struct report *report, uint64_t began_us);
uint64_t launch_now_us(void);

void default_signals(void); /* all signals as a program expects them, whatever our parent ignored */

#endif
