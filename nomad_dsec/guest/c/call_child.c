/* Between fork and exec of a call's program: enter its namespaces, take its limits, become nobody. */
#include "call.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXEC_AT 3

static struct call_report *report;

static _Noreturn void fail(uint32_t step)
{
	report->error = (uint32_t)(errno ? errno : EIO);
	report->step = step;
	_exit(127);
}

void drop_all_caps(bool bounding)
{
	if (bounding)
		for (int cap = 0; cap < 64 && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0; cap++)
			;
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct none[2] = {0};
	syscall(SYS_capset, &header, none);
}

struct helper {
	const struct call_start *start;
	int *pidfd;
	int error;
	pid_t pid;
};

/* Shares memory and descriptors with PID 1. It is there because setns(2) to a pid namespace can't be taken back: ours
 * belongs to the host's user namespace. CLONE_PARENT makes the program PID 1's child. */
static int help(void *context)
{
	struct helper *h = context;
	struct clone_args args = {.flags = CLONE_PARENT | CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)h->pidfd};
	if (setns(h->start->slot->pidfd, CLONE_NEWPID)) {
		h->error = errno;
		return 1;
	}
	long pid = syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0)
		call_child(h->start);
	h->error = pid < 0 ? errno : 0;
	h->pid = (pid_t)pid;
	return 0;
}

pid_t call_fork(const struct call_start *s, int *pidfd)
{
	static char stack[256 * 1024] __attribute__((aligned(16)));
	struct helper h = {.start = s, .pidfd = pidfd, .pid = -1};
	pid_t helper = clone(help, stack + sizeof stack, CLONE_VM | CLONE_VFORK | CLONE_FILES | SIGCHLD, &h);
	if (helper < 0)
		return -1;
	while (waitpid(helper, NULL, 0) < 0 && errno == EINTR)
		;
	errno = h.error;
	return h.pid;
}

static void put_limit(int resource, uint64_t soft, uint64_t hard)
{
	struct rlimit now, want = {.rlim_cur = soft, .rlim_max = hard};
	if (getrlimit((__rlimit_resource_t)resource, &now))
		fail(STEP_LIMITS);
	if (want.rlim_max > now.rlim_max) /* to raise it takes a capability of the host */
		want.rlim_max = now.rlim_max;
	if (want.rlim_cur > want.rlim_max)
		want.rlim_cur = want.rlim_max;
	if (setrlimit((__rlimit_resource_t)resource, &want))
		fail(STEP_LIMITS);
}

static void set_limits(const struct call_request *r)
{
	/* RLIMIT_CPU counts whole seconds of one process; the tree's exact time is watched from outside. */
	uint64_t cpu_s = (r->cpu_us + 999999) / 1000000 + 1;
	put_limit(RLIMIT_CPU, cpu_s, cpu_s + 1);
	put_limit(RLIMIT_FSIZE, r->disk_bytes, r->disk_bytes);
	put_limit(RLIMIT_STACK, r->stack_bytes, r->stack_bytes);
	put_limit(RLIMIT_NOFILE, r->nofile, r->nofile);
	put_limit(RLIMIT_CORE, 0, 0);
}

static void be_killable(void)
{
	/* Undumpable, as PID 1's memory is, our entries of procfs would belong to the host's root. */
	prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, "0", 1) != 1)
		fail(STEP_ENTER);
	close(fd);
}

static void become_nobody(void)
{
	if (setgroups(0, NULL) || setresgid(CALL_USER, CALL_USER, CALL_USER))
		fail(STEP_USER);
	for (int cap = 0; cap < 64 && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0; cap++)
		;
	if (setresuid(CALL_USER, CALL_USER, CALL_USER) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		fail(STEP_USER);
	drop_all_caps(false);
}

static _Noreturn void run(char **argv, char **envp)
{
	int error = ENOENT;
	if (strchr(argv[0], '/')) {
		execve(argv[0], argv, envp);
		fail(STEP_EXEC);
	}
	const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
	for (char **e = envp; *e; e++)
		if (strncmp(*e, "PATH=", 5) == 0)
			path = *e + 5;
	while (path) {
		const char *end = strchr(path, ':');
		char full[4096];
		int n = (int)(end ? end - path : (ptrdiff_t)strlen(path));
		if (snprintf(full, sizeof full, "%.*s/%s", n, n ? path : ".", argv[0]) < (int)sizeof full) {
			execve(full, argv, envp);
			if (errno != ENOENT && errno != ENOTDIR)
				error = errno;
			if (errno != ENOENT && errno != ENOTDIR && errno != EACCES)
				break;
		}
		path = end ? end + 1 : NULL;
	}
	errno = error;
	fail(STEP_EXEC);
}

_Noreturn void call_child(const struct call_start *s)
{
	const struct call *c = s->call;
	report = s->report;
	errno = 0;
	if (setns(s->slot->pidfd, CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS))
		fail(STEP_ENTER);
	if (setsid() < 0 || dup2(s->in, 0) < 0 || dup2(s->out, 1) < 0 || dup2(s->err, 2) < 0)
		fail(STEP_ENTER);
	unsigned first = EXEC_AT;
	if (c->r.flags & CALL_EXEC_FD) {
		if (c->exec_fd != EXEC_AT && dup3(c->exec_fd, EXEC_AT, O_CLOEXEC) < 0)
			fail(STEP_ENTER);
		first++;
	}
	syscall(SYS_close_range, first, ~0u, 0u);
	be_killable();
	umask(022);
	signal(SIGPIPE, SIG_DFL);
	set_limits(&c->r);
	if (chdir(CALL_WORK))
		fail(STEP_ENTER);
	become_nobody();
	if (c->r.flags & CALL_PROBE)
		_exit(call_probe());
	if (c->r.flags & CALL_EXEC_FD) {
		syscall(SYS_execveat, EXEC_AT, "", c->argv, c->envp, 0x1000 /* AT_EMPTY_PATH */);
		fail(STEP_EXEC);
	}
	run(c->argv, c->envp);
}
