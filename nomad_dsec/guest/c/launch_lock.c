/* The operations that take rights away: limits, user namespace, sysctls, Landlock, capabilities, seccomp. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define LANDLOCK_RULE_PATH_BENEATH 1

/* linux/landlock.h of ABI 6 (Linux 6.12); older kernels get the shorter size when the tail is zero. */
struct landlock_ruleset {
	uint64_t handled_fs;
	uint64_t handled_net;
	uint64_t scoped;
};

struct landlock_beneath {
	uint64_t allowed;
	int32_t parent_fd;
} __attribute__((packed));

int op_rlimit(struct launch *l, const struct op *op)
{
	struct rlimit now, want = {.rlim_cur = (rlim_t)op->f[1].number, .rlim_max = (rlim_t)op->f[2].number};
	if (getrlimit((__rlimit_resource_t)op->f[0].number, &now))
		return launch_fail(l, "getrlimit");
	/* A host whose own hard limit is lower keeps it: raising takes CAP_SYS_RESOURCE, which hosts withhold. */
	if (want.rlim_max > now.rlim_max)
		want.rlim_max = now.rlim_max;
	if (want.rlim_cur > want.rlim_max)
		want.rlim_cur = want.rlim_max;
	return setrlimit((__rlimit_resource_t)op->f[0].number, &want) ? launch_fail(l, "setrlimit") : 0;
}

/* Best effort: lowering the score takes CAP_SYS_RESOURCE, which some hosts' root lacks. */
int op_oom_score(struct launch *l, const struct op *op)
{
	char text[16];
	int length = snprintf(text, sizeof(text), "%d", (int)op->f[0].number - 1000);
	int fd = root_open(l, "/proc/self/oom_score_adj", O_WRONLY, RESOLVE_IN_ROOT);
	l->detail = NULL;
	if (fd < 0)
		return 0;
	ssize_t ignored = write(fd, text, (size_t)length);
	(void)ignored;
	close(fd);
	return 0;
}

/* Best effort: raising the priority takes CAP_SYS_NICE of the host. However many programs of the sandbox want its share of
 * the CPU, its PID 1 gets to run, so that timeouts are kept and the host is answered. */
int op_nice(struct launch *l, const struct op *op)
{
	(void)l;
	setpriority(PRIO_PROCESS, 0, (int)op->f[0].number - 20);
	return 0;
}

int op_enter_userns(struct launch *l, const struct op *op)
{
	(void)op;
	if (setns(l->userns_fd, CLONE_NEWUSER))
		return launch_fail(l, "setns");
	if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0))
		return launch_fail(l, "become root inside");
	return 0;
}

/* Only names below user/, on procfs and never across a mount (CVE-2025-52881, CVE-2022-0811). */
int op_sysctl(struct launch *l, const struct op *op)
{
	const char *name = op->f[0].data;
	struct open_how how = {.flags = O_WRONLY | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS};
	struct statfs fs;
	if (strncmp(name, "user/", 5)) {
		errno = EPERM;
		return launch_fail(l, name);
	}
	int fd = (int)syscall(SYS_openat2, l->sysctl_fd, name, &how, sizeof(how));
	if (fd < 0)
		return launch_fail(l, name);
	if (fstatfs(fd, &fs) || fs.f_type != PROC_SUPER_MAGIC) {
		errno = EXDEV;
		return launch_close(fd, launch_fail(l, name));
	}
	ssize_t wrote = write(fd, op->f[1].data, op->f[1].length);
	return launch_close(fd, wrote == (ssize_t)op->f[1].length ? 0 : launch_fail(l, name));
}

int op_landlock(struct launch *l, const struct op *op)
{
	struct landlock_ruleset rules = {
		.handled_fs = op->f[0].number, .handled_net = op->f[1].number, .scoped = op->f[2].number};
	size_t size = rules.scoped ? sizeof(rules) : rules.handled_net ? 16 : 8;
	l->landlock_fd = (int)syscall(SYS_landlock_create_ruleset, &rules, size, 0);
	return l->landlock_fd < 0 ? launch_fail(l, "landlock_create_ruleset") : 0;
}

int op_landlock_path(struct launch *l, const struct op *op)
{
	int at = root_open(l, op->f[0].data, O_PATH, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
	if (at < 0)
		return -1;
	struct landlock_beneath rule = {.allowed = op->f[1].number, .parent_fd = at};
	long result = syscall(SYS_landlock_add_rule, l->landlock_fd, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
	return launch_close(at, result ? launch_fail(l, op->f[0].data) : 0);
}

int op_landlock_self(struct launch *l, const struct op *op)
{
	(void)op;
	return syscall(SYS_landlock_restrict_self, l->landlock_fd, 0) ? launch_fail(l, "landlock_restrict_self") : 0;
}

int op_no_new_privs(struct launch *l, const struct op *op)
{
	(void)op;
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ? launch_fail(l, "prctl") : 0;
}

int op_caps(struct launch *l, const struct op *op)
{
	uint64_t keep = op->f[0].number;
	l->exec_caps = op->f[1].number;
	for (int cap = 0; cap < 64; cap++)
		if (!(keep >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0)) {
			if (errno == EINVAL)
				break; /* past the kernel's last one */
			return launch_fail(l, "prctl");
		}
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {
		{.effective = (uint32_t)keep, .permitted = (uint32_t)keep},
		{.effective = (uint32_t)(keep >> 32), .permitted = (uint32_t)(keep >> 32)},
	};
	return syscall(SYS_capset, &header, data) ? launch_fail(l, "capset") : 0;
}

int op_seccomp(struct launch *l, const struct op *op)
{
	uint32_t bytes = op->f[0].length;
	if (bytes == 0 || bytes % sizeof(struct sock_filter) || bytes / sizeof(struct sock_filter) > BPF_MAXINSNS) {
		errno = EINVAL;
		return launch_fail(l, "program size");
	}
	struct sock_fprog program = {
		.len = (unsigned short)(bytes / sizeof(struct sock_filter)),
		.filter = (struct sock_filter *)(uintptr_t)op->f[0].data,
	};
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) ? launch_fail(l, "seccomp") : 0;
}
