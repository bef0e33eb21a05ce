/* The table of operations, and carrying a list out. */
#include "launch.h"

#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int op_cgroup(struct launch *l, const struct op *op)
{
	int fd = launch_fd(l, op->f[0].number);
	return fd < 0 || write(fd, "0", 1) != 1 ? launch_fail(l, "cgroup.procs") : 0;
}

static int op_unshare(struct launch *l, const struct op *op)
{
	return unshare((int)op->f[0].number) ? launch_fail(l, "unshare") : 0;
}

static int op_setns(struct launch *l, const struct op *op)
{
	int fd = launch_fd(l, op->f[0].number);
	return fd < 0 || setns(fd, (int)op->f[1].number) ? launch_fail(l, "setns") : 0;
}

static int op_hostname(struct launch *l, const struct op *op)
{
	return sethostname(op->f[0].data, op->f[0].length) ? launch_fail(l, "sethostname") : 0;
}

static int op_serve(struct launch *l, const struct op *op)
{
	l->listen_fd = launch_fd(l, op->f[0].number);
	l->cgroup_fd = op->f[1].number == NO_FD ? -1 : launch_fd(l, op->f[1].number);
	l->exec_flags = (uint32_t)op->f[2].number;
	l->log_bytes = op->f[3].number;
	l->oom_fd = op->f[4].number == NO_FD ? -1 : launch_fd(l, op->f[4].number);
	return l->listen_fd < 0 ? -1 : 0;
}

static const struct op_kind KINDS[] = {
	{OP_USERNS, "nn", NULL},
	{OP_CLONE, "nn", NULL},
	{OP_CGROUP, "n", op_cgroup},
	{OP_UNSHARE, "n", op_unshare},
	{OP_SETNS, "nn", op_setns},
	{OP_HOSTNAME, "s", op_hostname},
	{OP_TMPFS_UPPER, "nn", op_tmpfs_upper},
	{OP_IDMAP, "n", op_idmap},
	{OP_OVERLAY, "nn", op_overlay},
	{OP_MOUNT, "sssnnn", op_mount},
	{OP_MKNOD, "snnn", op_mknod},
	{OP_SYMLINK, "ss", op_symlink},
	{OP_BIND, "nsn", op_bind},
	{OP_MASK, "s", op_mask},
	{OP_READONLY, "snn", op_readonly},
	{OP_ROOT, "", op_root},
	{OP_RLIMIT, "nnn", op_rlimit},
	{OP_OOM_SCORE, "n", op_oom_score},
	{OP_ENTER_USERNS, "", op_enter_userns},
	{OP_SYSCTL, "ss", op_sysctl},
	{OP_FILE, "sbnn", op_file},
	{OP_REMOUNT, "sn", op_remount},
	{OP_LANDLOCK, "nnn", op_landlock},
	{OP_LANDLOCK_PATH, "sn", op_landlock_path},
	{OP_LANDLOCK_SELF, "", op_landlock_self},
	{OP_NO_NEW_PRIVS, "", op_no_new_privs},
	{OP_CAPS, "nn", op_caps},
	{OP_SECCOMP, "b", op_seccomp},
	{OP_PIN, "s", op_pin},
	{OP_SERVE, "nnnnn", op_serve},
	{OP_DISK_UPPER, "n", op_disk_upper},
	{OP_NICE, "n", op_nice},
};

const struct op_kind *op_kind_of(uint32_t code)
{
	/* The table is in the order of the codes, from 1. */
	if (code == 0 || code > sizeof(KINDS) / sizeof(KINDS[0]))
		return NULL;
	return &KINDS[code - 1];
}

uint64_t launch_now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

int carry_out(struct launch *l, struct plan *p, struct report *report, uint64_t began_us)
{
	struct op op;
	for (uint32_t i = 0; plan_next(p, &op); i++) {
		const struct op_kind *kind = op_kind_of(op.code);
		l->detail = NULL;
		report->done = i;
		if (kind->run && kind->run(l, &op)) {
			report->error = errno ? errno : EIO;
			snprintf(report->detail, sizeof(report->detail), "%s", l->detail ? l->detail : "");
			return -1;
		}
		report->us[i] = (uint32_t)(launch_now_us() - began_us);
	}
	report->done = p->op_count;
	return 0;
}
