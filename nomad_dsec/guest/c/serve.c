/* init_serve: make this process fit to be PID 1 of a sandbox, then run the loop. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "loop.h"
#include "serve.h"
#include "state.h"

struct init_options options;
static uint8_t boot_id[16];
static struct source listener = {.fd = -1};

void init_options_default(struct init_options *o)
{
	*o = (struct init_options){
	    .listen_fd = -1, .stream_fd = -1, .cgroup_fd = -1, .oom_fd = -1, .root_fd = -1, .exec_caps = UINT64_MAX};
}

const uint8_t *serve_boot_id(void) { return boot_id; }

void serve_conn_closed(unsigned left)
{
	if (left == 0 && listener.fd < 0)
		loop_stop(0);
}

static void keep_fd(int fd, int *fds, int *count)
{
	if (fd < 3)
		return;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	int at = (*count)++;
	while (at > 0 && fds[at - 1] > fd) {
		fds[at] = fds[at - 1];
		at--;
	}
	fds[at] = fd;
}

static void close_others(void)
{
	int fds[6], count = 0;
	keep_fd(options.listen_fd, fds, &count);
	keep_fd(options.stream_fd, fds, &count);
	keep_fd(options.cgroup_fd, fds, &count);
	keep_fd(options.oom_fd, fds, &count);
	keep_fd(options.root_fd, fds, &count);
	unsigned first = 3;
	for (int i = 0; i < count; i++) {
		if ((unsigned)fds[i] > first)
			syscall(SYS_close_range, first, (unsigned)fds[i] - 1, 0u);
		first = (unsigned)fds[i] + 1;
	}
	syscall(SYS_close_range, first, ~0u, 0u);
	/* Descriptors 0-2 must be taken, or a pipe of an exec could land there and be overwritten in the child. */
	int fd = open("/dev/null", O_RDWR | O_NONBLOCK);
	while (fd >= 0 && fd < 3)
		fd = dup(fd);
	if (fd >= 3)
		close(fd);
}

/* The bounding set limits what a program gets from execve, also a setuid one; this process never execs. */
static void drop_bounding(void)
{
	if (options.exec_caps == UINT64_MAX)
		return;
	for (int cap = 0; cap < 64; cap++)
		if (!(options.exec_caps >> cap & 1) && prctl(PR_CAPBSET_READ, cap, 0, 0, 0) == 1)
			prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
}

static void oom_protect(void)
{
	/* Not -1000: programs can lower their own score to ours, and must stay killable; at the same score the smallest,
	 * which we are, goes last. */
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, "-998", 4) != 4)
		options.flags &= ~INIT_OOM_PROTECT;
	if (fd >= 0)
		close(fd);
}

static void end_all(int status)
{
	if (getpid() == 1)
		kill(-1, SIGKILL);
	else
		for (struct exec *e = execs; e; e = e->next)
			if (!e->reaped || e->tree)
				tree_signal(e->tree, e->pid, SIGKILL);
	if (options.flags & INIT_POWEROFF) {
		sync();
		reboot(RB_POWER_OFF);
	}
	_exit(status); /* as PID 1 this takes the whole pid namespace along */
}

static bool is_character_device(int fd)
{
	struct stat st;
	return fstat(fd, &st) == 0 && S_ISCHR(st.st_mode);
}

int init_serve(const struct init_options *o)
{
	options = *o;
	close_others();
	umask(022);
	setsid(); /* a signal to the process group that we came from must not be one to us */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* for tests without a pid namespace; PID 1 is one anyway */
	if (options.flags & INIT_OOM_PROTECT)
		oom_protect();
	drop_bounding();
	if (getrandom(boot_id, sizeof boot_id, GRND_NONBLOCK) != (ssize_t)sizeof boot_id)
		store_u64(boot_id, now_us() ^ (uint64_t)getpid() << 48);
	loop_init();
	execs_init(options.log_bytes);
	trees_init(options.cgroup_fd);
	if (options.listen_fd >= 0) {
		fcntl(options.listen_fd, F_SETFL, O_NONBLOCK);
		source_add(&listener, options.listen_fd, EPOLLIN, conn_accept);
	}
	if (options.stream_fd >= 0) {
		fcntl(options.stream_fd, F_SETFL, O_NONBLOCK | O_RDWR);
		if (!conn_open(options.stream_fd, is_character_device(options.stream_fd)))
			return 1;
	}
	int status = loop_run();
	conns_flush(); /* the OK of SHUTDOWN */
	end_all(status);
	return status;
}
