/* The namespaces of one call, made before the call is known and held by their PID 1, the reaper. */
#include "call.h"

#include <errno.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define INODES 16384
#define READY_MS 10000
#define DEATH_MS 10000

static int send_fd(int sock, int fd)
{
	char byte = 'R';
	struct iovec part = {&byte, 1};
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} space = {0};
	struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	return sendmsg(sock, &m, MSG_NOSIGNAL) == 1 ? 0 : -1;
}

/* The fd that came; -1 when the sender died, or reported an errno (as the byte count of nothing: errno is set). */
static int receive_fd(int sock)
{
	struct pollfd p = {.fd = sock, .events = POLLIN};
	if (poll(&p, 1, READY_MS) != 1) {
		errno = ETIMEDOUT;
		return -1;
	}
	char byte;
	struct iovec part = {&byte, 1};
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} space = {0};
	struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
	if (recvmsg(sock, &m, MSG_CMSG_CLOEXEC) != 1) {
		errno = EPIPE;
		return -1;
	}
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	if (!c || c->cmsg_type != SCM_RIGHTS) {
		errno = (unsigned char)byte;
		return -1;
	}
	int fd;
	memcpy(&fd, CMSG_DATA(c), sizeof fd);
	return fd;
}

/* The lane's root is read-only already. subset=pid: nothing of the kernel is in this procfs but the call's processes,
 * so that nothing has to be masked. */
static int build(uint64_t disk_bytes)
{
	char options[96];
	snprintf(options, sizeof options, "size=%llu,nr_inodes=%d,mode=1777", (unsigned long long)disk_bytes, INODES);
	if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid") ||
	    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options))
		return -1;
	if (mkdir(CALL_WORK, 0755) || chown(CALL_WORK, CALL_USER, CALL_USER) || mkdir("/tmp/.shm", 0777) ||
	    chmod("/tmp/.shm", 01777))
		return -1;
	return open(CALL_WORK, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static _Noreturn void reaper(int sock, uint64_t disk_bytes)
{
	umask(0);
	int fd = build(disk_bytes);
	if (fd < 0) {
		char error = (char)errno;
		if (write(sock, &error, 1) != 1)
			_exit(126);
		_exit(125);
	}
	drop_all_caps(false);
	prctl(PR_SET_NAME, "dsec-call", 0, 0, 0);
	/* setns(2) to our namespaces asks whether we could be traced; programs inside can't: other ids, no capability. */
	prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
	signal(SIGCHLD, SIG_IGN); /* orphans are reaped by the kernel */
	if (send_fd(sock, fd))
		_exit(124);
	syscall(SYS_close_range, 0u, ~0u, 0u);
	for (;;)
		pause();
}

bool slot_make(struct call_slot *s, uint64_t disk_bytes)
{
	int pair[2];
	*s = (struct call_slot){.pidfd = -1, .work_fd = -1, .disk_bytes = disk_bytes};
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		return false;
	struct clone_args args = {
	    .flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_PIDFD,
	    .pidfd = (uint64_t)(uintptr_t)&s->pidfd,
	    .exit_signal = SIGCHLD,
	};
	long pid = syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0)
		reaper(pair[1], disk_bytes);
	int saved = errno;
	close(pair[1]);
	if (pid > 0) {
		s->reaper = (pid_t)pid;
		s->work_fd = receive_fd(pair[0]);
		saved = errno;
	}
	close(pair[0]);
	if (s->work_fd < 0)
		slot_end(s);
	errno = saved;
	return s->work_fd >= 0;
}

bool slot_end(struct call_slot *s)
{
	bool gone = true;
	if (s->reaper > 0) {
		struct pollfd p = {.fd = s->pidfd, .events = POLLIN};
		kill(s->reaper, SIGKILL);
		/* It turns readable only when all of its namespace are dead and reaped. */
		gone = poll(&p, 1, DEATH_MS) == 1 && waitpid(s->reaper, NULL, __WALL) == s->reaper;
	}
	if (s->pidfd >= 0)
		close(s->pidfd);
	if (s->work_fd >= 0)
		close(s->work_fd);
	*s = (struct call_slot){.pidfd = -1, .work_fd = -1};
	return gone;
}
