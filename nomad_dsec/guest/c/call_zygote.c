/* The socket to the zygote: an interpreter of the image, started once, that forks a child for each call. */
#include "call.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define READY_MS 20000
#define REPORT_MS 20000
#define SOCKET_AT 3
#define PIPE_BYTES (32u * 1024) /* half of what a pipe takes at once */

static _Noreturn void become_zygote(const struct call *c, int sock)
{
	int null = open("/dev/null", O_RDWR);
	if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0 || dup2(sock, SOCKET_AT) < 0)
		_exit(127);
	syscall(SYS_close_range, SOCKET_AT + 1u, ~0u, 0u);
	if (sock == SOCKET_AT)
		fcntl(SOCKET_AT, F_SETFD, 0);
	setsid();
	signal(SIGPIPE, SIG_DFL);
	if (chdir("/"))
		_exit(127);
	execvpe(c->argv[0], c->argv, c->envp);
	_exit(127);
}

pid_t zygote_start(const struct call *c, int *sock)
{
	int pair[2];
	char word = 0;
	*sock = -1;
	if (c->r.argc == 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
		return 0;
	pid_t pid = fork();
	if (pid == 0)
		become_zygote(c, pair[1]);
	close(pair[1]);
	struct pollfd p = {.fd = pair[0], .events = POLLIN};
	if (pid > 0 && poll(&p, 1, READY_MS) == 1 && read(pair[0], &word, 1) == 1 && word == 'R') {
		*sock = pair[0];
		return pid;
	}
	close(pair[0]);
	if (pid > 0) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
	}
	return 0;
}

/* argv and env of the call, for its child alone to read: what the zygote itself had read would stay in its memory, which
 * all later children get a copy of. */
static int words_fd(const uint8_t *at, size_t size)
{
	int pair[2];
	if (size <= PIPE_BYTES && pipe2(pair, O_CLOEXEC) == 0) {
		bool whole = write(pair[1], at, size) == (ssize_t)size;
		close(pair[1]);
		if (whole)
			return pair[0];
		close(pair[0]);
		return -1;
	}
	int fd = memfd_create("words", MFD_CLOEXEC);
	if (fd >= 0 && (write(fd, at, size) != (ssize_t)size || lseek(fd, 0, SEEK_SET) != 0)) {
		close(fd);
		return -1;
	}
	return fd;
}

bool zygote_ask(int sock, const struct call *c, const struct call_slot *slot, int in, int out, int err)
{
	const uint8_t *words = (const uint8_t *)c->argv[0]; /* argv and env lie together in the payload */
	int fds[5] = {slot->pidfd, in, out, err, words_fd(words, (size_t)(c->words_end - words))};
	if (fds[4] < 0)
		return false;
	struct iovec part = {(void *)(uintptr_t)&c->r, sizeof c->r};
	union {
		char bytes[CMSG_SPACE(sizeof fds)];
		struct cmsghdr align;
	} space = {0};
	struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof fds);
	memcpy(CMSG_DATA(h), fds, sizeof fds);
	bool sent = sendmsg(sock, &m, MSG_NOSIGNAL) == (ssize_t)sizeof c->r;
	close(fds[4]);
	return sent;
}

bool zygote_report(int sock, struct zygote_report *r)
{
	struct pollfd p = {.fd = sock, .events = POLLIN};
	return poll(&p, 1, REPORT_MS) == 1 && recv(sock, r, sizeof *r, 0) == (ssize_t)sizeof *r;
}
