/* Attacks over sockets. */
#define _GNU_SOURCE
#include "attack.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static struct sockaddr_in address_of(const char *ip, long long port)
{
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
	inet_pton(AF_INET, ip, &to.sin_addr);
	return to;
}

/* One TCP connect: 0, or the errno; ETIMEDOUT when nothing answers within timeout_ms. */
static int try_connect(const char *ip, long long port, int timeout_ms)
{
	struct sockaddr_in to = address_of(ip, port);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return errno;
	int result = connect(fd, (struct sockaddr *)&to, sizeof(to)) ? errno : 0;
	if (result == EINPROGRESS) {
		struct pollfd one = {.fd = fd, .events = POLLOUT};
		socklen_t size = sizeof(result);
		if (poll(&one, 1, timeout_ms) != 1)
			result = ETIMEDOUT;
		else
			getsockopt(fd, SOL_SOCKET, SO_ERROR, &result, &size);
	}
	close(fd);
	return result;
}

/* connect TIMEOUT_MS IP PORT [IP PORT...]: "<ip>:<port> <errno>" each. */
static int v_connect(int argc, char **argv)
{
	char key[64];
	for (int i = 1; i + 1 < argc; i += 2) {
		snprintf(key, sizeof(key), "%s:%s", argv[i], argv[i + 1]);
		say(key, try_connect(argv[i], number(argv[i + 1]), (int)number(argv[0])));
	}
	return 0;
}

/* scan IP FIRST LAST: how many ports took the connection; a silent one costs 50 ms. */
static int v_scan(int argc, char **argv)
{
	long long open_ports = 0, refused = 0, others = 0;
	if (argc < 3)
		return 2;
	for (long long port = number(argv[1]); port <= number(argv[2]); port++) {
		int result = try_connect(argv[0], port, 50);
		if (result == 0)
			open_ports++;
		else if (result == ECONNREFUSED)
			refused++;
		else
			others++;
	}
	say("open", open_ports);
	say("refused", refused);
	return say("others", others);
}

/* udp IP PORT: send one datagram. */
static int v_udp(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	struct sockaddr_in to = address_of(argv[0], number(argv[1]));
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	return say_errno("errno", fd < 0 ? -1 : sendto(fd, "x", 1, 0, (struct sockaddr *)&to, sizeof(to)));
}

static socklen_t abstract_name(struct sockaddr_un *to, const char *name)
{
	*to = (struct sockaddr_un){.sun_family = AF_UNIX};
	strncpy(to->sun_path + 1, name, sizeof(to->sun_path) - 2);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

/* abstract NAME: connect to an abstract unix socket. */
static int v_abstract(int argc, char **argv)
{
	struct sockaddr_un to;
	socklen_t size = abstract_name(&to, argc ? argv[0] : "");
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	return say_errno("errno", fd < 0 ? -1 : connect(fd, (struct sockaddr *)&to, size));
}

/* listen PORT: whether the port may be taken. */
static int v_listen(int argc, char **argv)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in at = address_of("0.0.0.0", argc ? number(argv[0]) : 0);
	return say_errno("errno", bind(fd, (struct sockaddr *)&at, sizeof(at)) || listen(fd, 8) ? -1 : 0);
}

/* serve PORT: accept on every address and answer "here" until killed. */
static int v_serve(int argc, char **argv)
{
	int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in at = address_of("0.0.0.0", argc ? number(argv[0]) : 0);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, (struct sockaddr *)&at, sizeof(at)) || listen(fd, 64))
		return say("errno", errno);
	say("listening", 1);
	for (;;) {
		int peer = accept(fd, NULL, NULL);
		if (peer >= 0 && write(peer, "here\n", 5) >= 0)
			close(peer);
	}
}

const struct verb net_verbs[] = {
	{"connect", v_connect}, {"scan", v_scan}, {"udp", v_udp}, {"abstract", v_abstract}, {"listen", v_listen}, {"serve", v_serve}, {NULL, NULL},
};
