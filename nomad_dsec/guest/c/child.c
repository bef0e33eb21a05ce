/* From fork to execve of one exec. Runs in the child: it may use memory freely, and reports failure in its slot. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "state.h"

enum { STEP_NONE, STEP_SETUP, STEP_CGROUP, STEP_PTY, STEP_RLIMIT, STEP_USER, STEP_CWD, STEP_EXEC };

static const char *default_path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const char *child_step_code(int step, int error)
{
	switch (step) {
	case STEP_PTY:
		return "pty_failed";
	case STEP_RLIMIT:
		return "rlimit_denied";
	case STEP_USER:
		/* EINVAL: an id that the sandbox's user namespace has not got */
		return error == ENOENT || error == EINVAL ? "user_unknown" : "start_failed";
	case STEP_CWD:
		return error == EACCES || error == EPERM || error == ELOOP ? "cwd_denied" : "cwd_missing";
	case STEP_EXEC:
		if (error == ENOENT || error == ENOTDIR)
			return "command_not_found";
		if (error == ENOEXEC || error == E2BIG || error == EINVAL || error == ELIBBAD || error == ENAMETOOLONG)
			return "command_invalid";
		return error == ENOMEM ? "no_memory" : error == EAGAIN ? "no_processes" : "command_denied";
	default:
		return error == ENOMEM ? "no_memory" : error == EAGAIN ? "no_processes" : "start_failed";
	}
}

static struct slot *report;

static _Noreturn void fail(int step, int error)
{
	report->error = error ? error : EIO;
	report->step = step;
	_exit(127);
}

pid_t fork_into(const struct tree *t, bool *inside)
{
	struct clone_args args = {.exit_signal = SIGCHLD};
	if (t) {
		args.flags = CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)t->dir_fd;
	}
	/* Not CLONE_VM|CLONE_VFORK: the program may lie on a file system that has to fetch it, and everybody would wait. */
	pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
	*inside = t != NULL;
	if (pid >= 0 || errno == EAGAIN || errno == ENOMEM)
		return pid;
	*inside = false; /* a filter or an old kernel: the child enters its cgroup by itself */
	return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (write(fd, text, strlen(text)) < 0)
		errno = 0; /* best effort: without it only the order of OOM kills differs */
	close(fd);
}

void child_level(void)
{
	if (getpriority(PRIO_PROCESS, 0) < 0)
		setpriority(PRIO_PROCESS, 0, 0);
}

void child_reset(void)
{
	signal(SIGPIPE, SIG_DFL);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	/* Where PID 1 may not lower its own score (no CAP_SYS_RESOURCE), programs raise theirs: either way they go first.
	 * In a user namespace the file is ours only while we are dumpable. That opens nothing: until the rights are given
	 * up below, ptrace(2) from inside fails for lack of capabilities (PID 1 has more than any exec). */
	prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
	write_file("/proc/self/oom_score_adj", options.flags & INIT_OOM_PROTECT ? "0" : "500");
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

static char *text_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	struct stat st;
	if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size > 4 * 1024 * 1024)
		return NULL;
	char *text = malloc((size_t)st.st_size + 1);
	ssize_t n = text ? read(fd, text, (size_t)st.st_size) : -1;
	close(fd);
	if (n < 0)
		return NULL;
	text[n] = 0;
	return text;
}

static bool number_of(const char *text, uint32_t *out)
{
	char *end;
	if (*text < '0' || *text > '9' || strlen(text) > 10)
		return false;
	unsigned long long value = strtoull(text, &end, 10);
	*out = (uint32_t)value;
	return *end == 0 && value < UINT32_MAX;
}

/* Split "a:b:c..." into at most n parts, in place; returns their number. */
static int split(char *line, char **parts, int n)
{
	int count = 0;
	for (char *at = line; count < n; at++) {
		parts[count++] = at;
		at = strchr(at, ':');
		if (!at)
			break;
		*at = 0;
	}
	return count;
}

static bool passwd_find(const char *name, uint32_t *uid, uint32_t *gid)
{
	char *text = text_file("/etc/passwd"), *save = NULL, *f[4];
	for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line; line = strtok_r(NULL, "\n", &save))
		if (split(line, f, 4) == 4 && strcmp(f[0], name) == 0) {
			char *end = strchr(f[3], ':');
			if (end)
				*end = 0;
			return number_of(f[2], uid) && number_of(f[3], gid);
		}
	return false;
}

static bool in_list(char *members, const char *name)
{
	char *save = NULL;
	for (char *m = strtok_r(members, ",", &save); m; m = strtok_r(NULL, ",", &save))
		if (strcmp(m, name) == 0)
			return true;
	return false;
}

/* gid of `group` when given (not NULL), and into `list` the groups that `user` is a member of. */
static bool group_find(const char *group, const char *user, uint32_t *gid, gid_t *list, size_t *count, size_t max)
{
	char *text = text_file("/etc/group"), *save = NULL, *f[4];
	bool found = false;
	for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line; line = strtok_r(NULL, "\n", &save)) {
		uint32_t number;
		int parts = split(line, f, 4);
		if (parts < 3 || !number_of(f[2], &number))
			continue;
		if (group && !found && strcmp(f[0], group) == 0) {
			*gid = number;
			found = true;
		}
		if (user && parts == 4 && *count < max && in_list(f[3], user))
			list[(*count)++] = number;
	}
	return found;
}

static int set_caps(uint64_t caps)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2];
	if (syscall(SYS_capget, &header, data) != 0)
		return -1;
	for (int i = 0; i < 2; i++) {
		data[i].permitted &= (uint32_t)(caps >> (32 * i));
		data[i].effective = data[i].permitted;
		data[i].inheritable = 0;
	}
	return (int)syscall(SYS_capset, &header, data);
}

int become_user(struct span user, uint64_t keep)
{
	uint32_t uid = 0, gid = 0;
	gid_t groups[64] = {0};
	size_t count = 0;
	char name[257];
	if (user.size > 256 || (user.size && memchr(user.at, 0, user.size)))
		return -ENOENT;
	if (user.size)
		memcpy(name, user.at, user.size);
	name[user.size] = 0;
	char *group = strchr(name, ':');
	if (group)
		*group++ = 0;
	if (name[0] && !number_of(name, &uid)) {
		if (!passwd_find(name, &uid, &gid))
			return -ENOENT;
		groups[count++] = gid;
		group_find(NULL, name, &gid, groups, &count, 64);
	} else {
		gid = uid;
	}
	if (group && !number_of(group, &gid) && !group_find(group, NULL, &gid, groups, &count, 64))
		return -ENOENT;
	if (group)
		count = 0;
	if (setgroups(count, groups) != 0 && !(errno == EPERM && count == 0 && uid == geteuid()))
		return -errno;
	if (setresgid(gid, gid, gid) != 0 || setresuid(uid, uid, uid) != 0)
		return -errno;
	return set_caps(uid == 0 ? options.exec_caps | keep : 0) == 0 ? 0 : -errno;
}

static void set_rlimits(struct span payload)
{
	struct field f;
	while (field_next(&payload, &f) == PARSE_OK) {
		if (f.tag != T_RLIMIT)
			continue;
		struct rlimit limit = {.rlim_cur = load_u64(f.value.at + 4), .rlim_max = load_u64(f.value.at + 12)};
		if (setrlimit((int)load_u32(f.value.at), &limit) != 0)
			fail(STEP_RLIMIT, errno);
	}
}

/* Values are made C strings by a NUL that overwrites the next field, which has been read by then: this is our copy. */
static char **strings(struct span payload, uint16_t tag)
{
	size_t count = 0;
	struct field f;
	struct span rest = payload;
	while (field_next(&rest, &f) == PARSE_OK)
		count += f.tag == tag;
	char **list = calloc(count + 1, sizeof *list);
	if (!list)
		fail(STEP_SETUP, ENOMEM);
	count = 0;
	while (field_next(&payload, &f) == PARSE_OK)
		if (f.tag == tag)
			list[count++] = (char *)(uintptr_t)f.value.at;
	return list;
}

static void terminate(struct span payload)
{
	struct field f, last = {0};
	bool any = false;
	while (field_next(&payload, &f) == PARSE_OK) {
		if (any)
			*(uint8_t *)(uintptr_t)(last.value.at + last.value.size) = 0;
		last = f;
		any = true;
	}
	if (any) /* the buffer has a spare byte behind the frame, or the next frame, which is not ours to read */
		*(uint8_t *)(uintptr_t)(last.value.at + last.value.size) = 0;
}

static void change_dir(const char *path)
{
	/* RESOLVE_NO_MAGICLINKS: a cwd of /proc/self/fd/N could name a directory outside (CVE-2024-21626). */
	struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
	int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
	if (fd < 0 || fchdir(fd) != 0)
		fail(STEP_CWD, errno);
	close(fd);
}

static _Noreturn void run(char **argv, char **envp)
{
	int error = ENOENT;
	if (strchr(argv[0], '/')) {
		execve(argv[0], argv, envp);
		fail(STEP_EXEC, errno);
	}
	const char *path = default_path;
	for (char **e = envp; *e; e++)
		if (strncmp(*e, "PATH=", 5) == 0)
			path = *e + 5;
	size_t name = strlen(argv[0]);
	for (const char *at = path;; at = strchr(at, ':') + 1) {
		const char *end = strchr(at, ':');
		size_t n = end ? (size_t)(end - at) : strlen(at);
		char full[4096];
		if (n + name + 2 <= sizeof full) {
			memcpy(full, at, n);
			size_t slash = n ? n : 0;
			if (n == 0)
				full[slash++] = '.';
			full[slash] = '/';
			if (slash + 2 + name <= sizeof full) {
				memcpy(full + slash + 1, argv[0], name + 1);
				execve(full, argv, envp);
				if (errno != ENOENT && errno != ENOTDIR)
					error = errno;
				if (errno != ENOENT && errno != ENOTDIR && errno != EACCES)
					break;
			}
		}
		if (!end)
			break;
	}
	fail(STEP_EXEC, error);
}

_Noreturn void child_exec(const struct start *s)
{
	report = s->slot;
	struct span user = {0}, cwd = {(const uint8_t *)"/", 1};
	field_find(s->payload, T_USER, &user);
	field_find(s->payload, T_CWD, &cwd);
	if (s->cgroup_procs_fd >= 0 && write(s->cgroup_procs_fd, "0", 1) != 1)
		fail(STEP_CGROUP, errno);
	if (setsid() < 0 || dup2(s->in, 0) < 0 || dup2(s->out, 1) < 0 || dup2(s->err, 2) < 0)
		fail(STEP_SETUP, errno);
	if (s->pty && ioctl(0, TIOCSCTTY, 0) != 0)
		fail(STEP_PTY, errno);
	syscall(SYS_close_range, 3u, ~0u, 0u);
	child_reset();
	set_rlimits(s->payload);
	int result = become_user(user, 0);
	if (result != 0)
		fail(STEP_USER, -result);
	char **argv = strings(s->payload, T_ARGV), **envp = strings(s->payload, T_ENV);
	terminate(s->payload);
	change_dir((const char *)cwd.at);
	if (s->no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		fail(STEP_SETUP, errno);
	child_level(); /* last: until here it is our own code, which must not stand in line behind the sandbox's programs */
	run(argv, envp);
}
