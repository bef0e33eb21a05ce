/* dsec-init: one static binary, PID 1 of every sandbox. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "init.h"

static int usage(const char *what)
{
	fprintf(stderr,
	        "dsec-init: %s\n"
	        "usage: dsec-init serve [--listen PATH] [--fd N] [--cgroup-fd N] [--oom-fd N] [--root DIR] [--caps HEX]\n"
	        "                       [--log-bytes N] [--no-new-privs] [--oom-protect] [--poweroff]\n"
	        "       dsec-init launch ...\n"
	        "  --fd N: a listening unix socket, or a connected stream\n",
	        what);
	return 2;
}

static int listen_at(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	if (strlen(path) >= sizeof address.sun_path)
		return -1;
	strcpy(address.sun_path, path);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 64) != 0)
		return -1;
	return fd;
}

static int serve_fd(struct init_options *o, int fd)
{
	int listening = 0;
	socklen_t size = sizeof listening;
	if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) == 0 && listening)
		o->listen_fd = fd;
	else
		o->stream_fd = fd;
	return fcntl(fd, F_GETFD);
}

static int serve(int argc, char **argv)
{
	struct init_options o;
	init_options_default(&o);
	for (int i = 2; i < argc; i++) {
		const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
		if (strcmp(name, "--no-new-privs") == 0) {
			o.flags |= INIT_NO_NEW_PRIVS;
			continue;
		}
		if (strcmp(name, "--oom-protect") == 0) {
			o.flags |= INIT_OOM_PROTECT;
			continue;
		}
		if (strcmp(name, "--poweroff") == 0) {
			o.flags |= INIT_POWEROFF;
			continue;
		}
		if (++i >= argc)
			return usage("an option lacks its value, or is unknown");
		if (strcmp(name, "--listen") == 0) {
			o.listen_fd = listen_at(value);
			if (o.listen_fd < 0)
				return usage("cannot listen at that path");
		} else if (strcmp(name, "--fd") == 0) {
			if (serve_fd(&o, atoi(value)) < 0)
				return usage("--fd: no such descriptor");
		} else if (strcmp(name, "--cgroup-fd") == 0) {
			o.cgroup_fd = atoi(value);
		} else if (strcmp(name, "--oom-fd") == 0) {
			o.oom_fd = atoi(value);
		} else if (strcmp(name, "--root") == 0) {
			o.root_fd = open(value, O_PATH | O_DIRECTORY | O_CLOEXEC);
			if (o.root_fd < 0)
				return usage("--root: no such directory");
		} else if (strcmp(name, "--caps") == 0) {
			o.exec_caps = strtoull(value, NULL, 16);
		} else if (strcmp(name, "--log-bytes") == 0) {
			o.log_bytes = strtoull(value, NULL, 10);
		} else {
			return usage("unknown option");
		}
	}
	if (o.listen_fd < 0 && o.stream_fd < 0)
		return usage("nothing to serve on: give --listen or --fd");
	return init_serve(&o);
}

int main(int argc, char **argv)
{
	if (argc >= 2 && strcmp(argv[1], "serve") == 0)
		return serve(argc, argv);
#ifndef NO_LAUNCH
	if (argc >= 2 && strcmp(argv[1], "launch") == 0)
		return launch_main(argc, argv);
	if (argc >= 2 && strcmp(argv[1], "inside") == 0)
		return inside_main(argc, argv);
#endif
	return usage("the first argument is serve, launch or inside");
}
