/* What no program of a call may do, tried with a program's rights before the lane's first call. */
#include "call.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <linux/sched.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool clone_gives(uint64_t flag)
{
	struct clone_args args = {.flags = flag, .exit_signal = SIGCHLD};
	long pid = syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0)
		_exit(0);
	return pid > 0;
}

static bool reaches_network(void)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(53)};
	inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (fd < 0)
		return false;
	bool sent = sendto(fd, "x", 1, MSG_DONTWAIT, (struct sockaddr *)&to, sizeof to) == 1;
	close(fd);
	return sent;
}

static bool writes(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static bool opens(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

int call_probe(void)
{
	int self;
	const bool broken[] = {
	    mount("none", "/tmp", "tmpfs", 0, NULL) == 0,
	    unshare(CLONE_NEWNS) == 0,
	    clone_gives(CLONE_NEWUSER),
	    clone_gives(CLONE_NEWPID),
	    clone_gives(CLONE_NEWNS),
	    (self = open("/proc/self/ns/mnt", O_RDONLY)) >= 0 && setns(self, CLONE_NEWNS) == 0,
	    setresuid(0, 0, 0) == 0,
	    syscall(SYS_ptrace, PTRACE_TRACEME, 0, 0, 0) == 0,
	    writes("/call-probe"),
	    writes("/dev/call-probe"),
	    opens("/proc/kallsyms"),
	    opens("/proc/1/environ"),
	    opens("/proc/sys/kernel/hostname"),
	    reaches_network(),
	    kill(1, 0) == 0,
	    getppid() != 0, /* the parent is not to be seen */
	    prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1,
	    prctl(PR_CAPBSET_READ, 0, 0, 0, 0) != 0,
	};
	for (size_t i = 0; i < sizeof broken / sizeof *broken; i++)
		if (broken[i])
			return (int)i + 1;
	return 0;
}
