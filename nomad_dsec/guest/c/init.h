/* The seam between the two halves of dsec-init: `launch` makes a sandbox, `init_serve` is PID 1 of it.
 * launch.c belongs to the container backend; everything else here to the guest room. */
#ifndef DSEC_INIT_H
#define DSEC_INIT_H

#include <stdint.h>

/* flags */
#define INIT_NO_NEW_PRIVS 1u   /* every exec gets PR_SET_NO_NEW_PRIVS, whatever it asks for */
#define INIT_POWEROFF 2u       /* SHUTDOWN ends in reboot(RB_POWER_OFF): this is a virtual machine */
#define INIT_OOM_PROTECT 4u    /* try oom_score_adj -998 for itself (execs get 0 again, or 500 where it fails) */
#define INIT_LANE 8u           /* lane_serve (call.h) in place of init_serve, on the connected socket listen_fd */

struct init_options {
	/* Listening AF_UNIX SOCK_STREAM socket bound by the host outside the sandbox's root; -1: none. */
	int listen_fd;
	/* One already connected stream (socketpair, virtio-serial port); -1: none. */
	int stream_fd;
	/* O_DIRECTORY descriptor of the sandbox's cgroup2 directory, writable by us; -1: none. Execs get children of it
	 * named "x<n>". Its cgroup.procs must be writable too (clone3 CLONE_INTO_CGROUP asks for the common ancestor). */
	int cgroup_fd;
	/* The file of the sandbox's memory cgroup that has the line `oom_kill N` (memory.events, or memory.oom_control of
	 * v1), open for reading; -1: an OOM kill looks like any SIGKILL. */
	int oom_fd;
	/* O_PATH|O_DIRECTORY descriptor that file paths resolve in; -1: our own "/". Only tests set it. */
	int root_fd;
	/* Capabilities (bit n = CAP_n) that execs may have: their bounding set, and the permitted and effective set of
	 * those that run as uid 0. Others get none. ~0: whatever this process has (no dropping). */
	uint64_t exec_caps;
	/* Bound in bytes for all output logs together; 0: 64 MiB. */
	uint64_t log_bytes;
	uint32_t flags;
};

/* All descriptors -1, all capabilities, no flags. */
void init_options_default(struct init_options *o);

/* Serve until SHUTDOWN (or until the last connection of a listener-less serve ends). Everything that the sandbox must
 * not have (seccomp filter, Landlock, namespaces, mounts) is in force before. It closes every descriptor but those
 * named in the options and 0-2, makes itself non-dumpable, and returns the exit status for the process. */
int init_serve(const struct init_options *o);

/* `dsec-init launch ...`: argv as in main(), argv[1] is "launch". In launch.c; absent with -DNO_LAUNCH. */
int launch_main(int argc, char **argv);

/* `dsec-init inside ...`: the process of an OCI bundle. In inside.c; absent with -DNO_LAUNCH. */
int inside_main(int argc, char **argv);

#endif
