/* `dsec-init launch --control-fd N`: the process that starts sandboxes for one node daemon.
 *
 * The daemon is large and threaded; forking from it, or starting a program per sandbox, costs more than the sandbox. So
 * this small one waits on a SOCK_SEQPACKET socket. A request names no path: it brings descriptors (the list of
 * operations, a status pipe, then what operations refer to by index). For each it makes a user namespace, clones a
 * child straight into its namespaces and cgroup, and answers with a pidfd. The child carries the list out and becomes
 * PID 1 of the sandbox. It is no one's child in any way that matters: when the daemon dies this process ends at the
 * end of the socket, and the sandboxes live on.
 *
 * It lives in a mount namespace of its own that holds nothing but an empty tmpfs, so that copying it is cheap and there is
 * nothing of the host in it; its procfs is a detached mount, reached by descriptor only. */
#include "launch.h"

#include "call.h"
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define REQUEST_MAGIC 0x51525344u /* "DSRQ" */
#define LAUNCHER_FDS 2		  /* the list and the status pipe come first */

struct request {
	uint32_t magic;
	uint32_t fds;
	uint64_t id;
};

struct reply {
	uint64_t id;
	int32_t pid;
	int32_t error;	 /* errno of what the spawner itself could not do */
	uint32_t failed; /* index of the operation, or ~0 when the request is at fault */
	uint32_t pad;
};

static int die(const char *what)
{
	fprintf(stderr, "dsec-init launch: %s: %s\n", what, strerror(errno));
	return 1;
}

static int proc_fd = -1;

/* A root of our own: a small tmpfs with the sources of masks and places to mount on. */
static int enter_scratch(void)
{
	if (unshare(CLONE_NEWNS))
		return die("unshare");
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return die("make mounts private");
	int fs = fsopen("proc", FSOPEN_CLOEXEC);
	if (fs < 0 || fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) ||
	    (proc_fd = fsmount(fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)) < 0)
		return die("procfs");
	close(fs);
	if (mount("dsec", "/proc", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,nr_inodes=32,mode=755") || chdir("/proc"))
		return die("tmpfs");
	if (mkdir("lower", 0755) || mkdir("upper", 0700) || mkdir("root", 0755) || mkdir("empty", 0555) ||
	    mknod("null", S_IFCHR | 0666, makedev(1, 3)))
		return die("scratch root");
	if (mount(NULL, "/proc", NULL, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL))
		return die("read-only scratch root");
	if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
		return die("pivot_root");
	return 0;
}

static int write_file(const char *path, const char *text)
{
	int fd = openat(proc_fd, path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t wrote = write(fd, text, strlen(text));
	return launch_close(fd, wrote < 0 ? -1 : 0);
}

static int wait_for_kill(void *unused)
{
	(void)unused;
	for (;;)
		pause();
	return 0;
}

/* A user namespace with one range, held by its descriptor. A short-lived child that shares our memory makes it. */
static int make_userns(uint64_t base, uint64_t count)
{
	static char stack[8192] __attribute__((aligned(16)));
	char path[64], map[64];
	int holder = clone(wait_for_kill, stack + sizeof(stack), CLONE_NEWUSER | CLONE_VM | CLONE_FILES, NULL);
	if (holder < 0)
		return -1;
	int fd = -1;
	snprintf(map, sizeof(map), "0 %llu %llu\n", (unsigned long long)base, (unsigned long long)count);
	snprintf(path, sizeof(path), "%d/uid_map", holder);
	if (write_file(path, map) == 0) {
		snprintf(path, sizeof(path), "%d/gid_map", holder);
		if (write_file(path, map) == 0) {
			snprintf(path, sizeof(path), "%d/ns/user", holder);
			fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
		}
	}
	int saved = errno;
	kill(holder, SIGKILL);
	while (waitpid(holder, NULL, __WALL) < 0 && errno == EINTR)
		;
	errno = saved;
	return fd;
}

static void close_all(const int *fds, int count)
{
	for (int i = 0; i < count; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

static void close_between(int first, int last)
{
	if (first <= last)
		syscall(SYS_close_range, (unsigned)first, (unsigned)last, 0);
}

/* Close all above 2 but these, of which some may be -1; close_range(2) (Linux 5.9). */
static void keep_only(const int keep[3])
{
	int first = 3;
	for (int round = 0; round < 3; round++) {
		int next = -1;
		for (int i = 0; i < 3; i++)
			if (keep[i] >= first && (next < 0 || keep[i] < next))
				next = keep[i];
		if (next < 0)
			break;
		close_between(first, next - 1);
		first = next + 1;
	}
	syscall(SYS_close_range, (unsigned)first, ~0u, 0);
}

/* Python ignores SIGPIPE and SIGXFSZ, posix_spawn(3) ignores 32 and 33: none of it is for programs inside. By the
 * system call, since sigaction(3) refuses the last two. */
void default_signals(void)
{
	static const uint64_t by_default[4]; /* struct sigaction of the kernel: SIG_DFL, no flags, no mask */
	for (int number = 1; number <= 64; number++)
		syscall(SYS_rt_sigaction, number, by_default, NULL, sizeof(uint64_t));
}

/* The new PID 1. Nothing of the launcher but its code is left when init_serve begins. */
static _Noreturn void run_sandbox(struct launch *l, struct plan *p, uint8_t *bytes, size_t size, int status)
{
	struct report *report = (struct report *)(void *)(bytes + p->report_offset);
	struct init_options options;
	sigset_t none;

	default_signals();
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	prctl(PR_SET_NAME, "dsec-init", 0, 0, 0);
	setsid();
	dup2(0, 2); /* the launcher's stderr is the host's */
	umask(0); /* operations give whole modes */
	int failed = carry_out(l, p, report, launch_now_us());
	uint64_t caps = l->exec_caps;
	munmap(bytes, size);
	/* The pipe's reader is the daemon: if it is gone nobody will ever own this sandbox. */
	if (write(status, failed ? "E" : "R", 1) != 1 || failed)
		_exit(125);

	umask(022);
	/* Nothing but the descriptors of the sandbox is left: a leaked one would be a way out (CVE-2024-21626). */
	init_options_default(&options);
	options.listen_fd = l->listen_fd;
	options.cgroup_fd = l->cgroup_fd;
	options.oom_fd = l->oom_fd;
	keep_only((int[3]){l->listen_fd, l->cgroup_fd, l->oom_fd});
	options.exec_caps = caps;
	options.flags = l->exec_flags;
	options.log_bytes = l->log_bytes;
	_exit(options.flags & INIT_LANE ? lane_serve(&options) : init_serve(&options));
}

/* Carry out the spawner's two operations; the pid, or -1 with the reply filled. */
static int spawn(struct launch *l, struct plan *p, uint8_t *bytes, size_t size, int status, struct reply *reply, int *pidfd)
{
	struct plan scan = *p;
	struct op op, userns = {0}, cloning = {0};
	for (uint32_t i = 0; plan_next(&scan, &op) && i < 2; i++)
		*(i ? &cloning : &userns) = op;
	reply->failed = ~0u;
	reply->error = EINVAL;
	if (userns.code != OP_USERNS || cloning.code != OP_CLONE)
		return -1;
	l->uid_base = userns.f[0].number;
	reply->failed = 0;
	l->userns_fd = make_userns(userns.f[0].number, userns.f[1].number);
	if (l->userns_fd < 0) {
		reply->error = errno;
		return -1;
	}
	reply->failed = 1;
	struct clone_args args = {
		.flags = cloning.f[0].number | CLONE_PIDFD,
		.pidfd = (uint64_t)(uintptr_t)pidfd,
		.exit_signal = SIGCHLD,
	};
	if (cloning.f[1].number != NO_FD) {
		int cgroup = launch_fd(l, cloning.f[1].number);
		if (cgroup < 0)
			return -1;
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)cgroup;
	}
	long pid = syscall(SYS_clone3, &args, sizeof(args));
	if (pid == 0)
		run_sandbox(l, p, bytes, size, status);
	if (pid < 0) {
		reply->error = errno;
		return -1;
	}
	reply->error = 0;
	return (int)pid;
}

static int handle(const struct request *request, int *fds, int nfds, struct reply *reply, int *pidfd)
{
	struct stat st;
	const char *why;
	struct plan p;
	reply->failed = ~0u;
	reply->error = EPROTO;
	if (request->magic != REQUEST_MAGIC || nfds < LAUNCHER_FDS || request->fds != (uint32_t)nfds ||
	    fstat(fds[0], &st) || st.st_size <= 0 || st.st_size > PLAN_MAX_BYTES)
		return -1;
	size_t size = (size_t)st.st_size;
	uint8_t *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	if (bytes == MAP_FAILED) {
		reply->error = errno;
		return -1;
	}
	int pid = -1;
	if (plan_open(&p, bytes, size, &why) == 0) {
		struct launch l = {.nfds = nfds - LAUNCHER_FDS, .userns_fd = -1, .root_fd = -1, .upper_fd = -1, .sysctl_fd = -1,
				   .landlock_fd = -1, .listen_fd = -1, .cgroup_fd = -1, .oom_fd = -1};
		memcpy(l.fds, fds + LAUNCHER_FDS, (size_t)l.nfds * sizeof(int));
		pid = spawn(&l, &p, bytes, size, fds[1], reply, pidfd);
		if (l.userns_fd >= 0)
			close(l.userns_fd);
	} else {
		fprintf(stderr, "dsec-init launch: bad list of operations: %s\n", why);
	}
	munmap(bytes, size);
	return pid;
}

static void answer(int control, const struct reply *reply, int pidfd)
{
	struct iovec part = {.iov_base = (void *)(uintptr_t)reply, .iov_len = sizeof(*reply)};
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} space = {0};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	if (pidfd >= 0) {
		message.msg_control = &space;
		message.msg_controllen = sizeof(space);
		struct cmsghdr *c = CMSG_FIRSTHDR(&message);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &pidfd, sizeof(int));
	}
	while (sendmsg(control, &message, MSG_NOSIGNAL) < 0 && errno == EINTR)
		;
}

/* One request: 0, or -1 when the daemon is gone. */
static int serve_one(int control)
{
	struct request request = {0};
	int fds[LAUNCH_MAX_FDS], nfds = 0;
	struct iovec part = {.iov_base = &request, .iov_len = sizeof(request)};
	union {
		char bytes[CMSG_SPACE(sizeof(int) * LAUNCH_MAX_FDS)];
		struct cmsghdr align;
	} space;
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof(space)};
	ssize_t got = recvmsg(control, &message, MSG_CMSG_CLOEXEC);
	if (got < 0)
		return errno == EINTR ? 0 : -1;
	if (got == 0)
		return -1;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			nfds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			memcpy(fds, CMSG_DATA(c), (size_t)nfds * sizeof(int));
		}
	int pidfd = -1;
	struct reply reply = {.id = request.id};
	if (got != sizeof(request) || message.msg_flags & MSG_CTRUNC)
		nfds = nfds > 0 ? (close_all(fds, nfds), 0) : 0;
	reply.pid = handle(&request, fds, nfds, &reply, &pidfd);
	answer(control, &reply, pidfd);
	if (pidfd >= 0)
		close(pidfd);
	close_all(fds, nfds);
	return 0;
}

int launch_main(int argc, char **argv)
{
	if (argc != 4 || strcmp(argv[2], "--control-fd")) {
		fprintf(stderr, "usage: dsec-init launch --control-fd N\n");
		return 2;
	}
	int control = atoi(argv[3]);
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0)
		return die("/dev/null");
	close(null);
	if (control < 3 || fcntl(control, F_SETFD, FD_CLOEXEC))
		return die("control descriptor");
	/* Whatever else the daemon's environment left open is not for sandboxes. */
	if (control > 3)
		syscall(SYS_close_range, 3u, (unsigned)control - 1, 0);
	syscall(SYS_close_range, (unsigned)control + 1, ~0u, 0);
	prctl(PR_SET_NAME, "dsec-launch", 0, 0, 0);
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGCHLD, SIG_IGN); /* sandboxes are waited for by pidfd; nobody has to reap them */
	if (setsid() < 0)
		errno = 0; /* a leader already */
	if (enter_scratch())
		return 1;
	while (serve_one(control) == 0)
		;
	return 0;
}
