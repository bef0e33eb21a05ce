/* `dsec-init inside --plan N --status M`: what runs as the process of an OCI bundle of ours.
 *
 * The OCI runtime has made namespaces, mounts, masks, limits and cgroups. What its configuration can't say, or says
 * differently with each runtime, is done here by the operations of the native launcher: Landlock scopes, the split of
 * capabilities between PID 1 and execs, and the one system call filter, installed last. Then this is PID 1 like any
 * other. Descriptors that operations name by index are 3, 4, ... as the runtime passed them (--preserve-fds). */
#include "launch.h"

#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define FIRST_FD 3

static int inside_usage(void)
{
	fprintf(stderr, "usage: dsec-init inside --plan N --status M\n");
	return 2;
}

static int refuse(int status)
{
	ssize_t ignored = write(status, "E", 1);
	(void)ignored;
	return 125;
}

/* The runtime had a file of nobody's as its standard descriptors; PID 1 has the sandbox's own /dev/null. */
static int quiet(void)
{
	struct stat st;
	int null = open("/dev/null", O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	if (null < 0 || fstat(null, &st) || !S_ISCHR(st.st_mode) || st.st_rdev != makedev(1, 3) || fcntl(null, F_SETFL, 0))
		return -1;
	for (int fd = 0; fd < FIRST_FD; fd++)
		if (dup2(null, fd) < 0)
			return -1;
	return close(null);
}

int inside_main(int argc, char **argv)
{
	if (argc != 6 || strcmp(argv[2], "--plan") || strcmp(argv[4], "--status"))
		return inside_usage();
	int plan_fd = atoi(argv[3]), status = atoi(argv[5]);
	if (plan_fd < FIRST_FD || status < FIRST_FD)
		return inside_usage();

	struct stat st;
	struct plan p;
	const char *why;
	if (fstat(plan_fd, &st) || st.st_size <= 0 || st.st_size > PLAN_MAX_BYTES)
		return refuse(status);
	size_t size = (size_t)st.st_size;
	uint8_t *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, plan_fd, 0);
	if (bytes == MAP_FAILED || plan_open(&p, bytes, size, &why))
		return refuse(status);

	struct launch l = {.userns_fd = -1, .root_fd = -1, .upper_fd = -1, .sysctl_fd = -1,
			   .landlock_fd = -1, .listen_fd = -1, .cgroup_fd = -1, .oom_fd = -1};
	/* Those below the list's own descriptor are what operations refer to. */
	for (int fd = FIRST_FD; fd < plan_fd && l.nfds < LAUNCH_MAX_FDS; fd++)
		l.fds[l.nfds++] = fd;
	prctl(PR_SET_NAME, "dsec-init", 0, 0, 0);
	default_signals();
	if (quiet())
		return refuse(status);
	int failed = carry_out(&l, &p, (struct report *)(void *)(bytes + p.report_offset), launch_now_us());
	munmap(bytes, size);
	if (failed)
		return refuse(status);
	if (write(status, "R", 1) != 1)
		return 125;
	/* init_serve closes every descriptor that its options do not name, these two included. */
	struct init_options options;
	init_options_default(&options);
	options.listen_fd = l.listen_fd;
	options.cgroup_fd = l.cgroup_fd;
	options.oom_fd = l.oom_fd;
	options.exec_caps = l.exec_caps;
	options.flags = l.exec_flags;
	options.log_bytes = l.log_bytes;
	return init_serve(&options);
}
