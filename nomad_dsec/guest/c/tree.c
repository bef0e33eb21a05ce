/* Exec trees as cgroups: children "x<n>" of the sandbox's cgroup, a few empty ones kept for reuse. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

#define KEEP_EMPTY 4u
#define WALK_ROUNDS 50

static int parent_fd = -1;
static struct tree *empty;
static unsigned empty_count, next_number;

static void name_of(char name[16], unsigned number) { snprintf(name, 16, "x%u", number); }

void trees_init(int cgroup_fd)
{
	parent_fd = cgroup_fd;
	struct tree *probe = parent_fd >= 0 ? tree_take() : NULL;
	if (probe)
		tree_give(probe);
	else
		parent_fd = -1;
}

bool trees_exact(void) { return parent_fd >= 0; }

static void tree_free(struct tree *t)
{
	char name[16];
	name_of(name, t->number);
	close(t->dir_fd);
	close(t->events_fd);
	unlinkat(parent_fd, name, AT_REMOVEDIR); /* fails only if it isn't empty; it goes with the sandbox then */
	loop_free_later(t);
}

struct tree *tree_take(void)
{
	while (empty) {
		struct tree *t = empty;
		empty = t->next;
		empty_count--;
		if (tree_is_empty(t)) /* nobody may enter from inside, but a reused tree must not hold a stranger */
			return t;
		tree_free(t);
	}
	if (parent_fd < 0)
		return NULL;
	struct tree *t = calloc(1, sizeof *t);
	if (!t)
		return NULL;
	char name[16];
	t->source.fd = -1;
	for (int tries = 0; tries < 64; tries++) {
		t->number = next_number++;
		name_of(name, t->number);
		if (mkdirat(parent_fd, name, 0755) == 0 || errno != EEXIST)
			break;
	}
	t->dir_fd = openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	t->events_fd = t->dir_fd < 0 ? -1 : openat(t->dir_fd, "cgroup.events", O_RDONLY | O_CLOEXEC);
	if (t->events_fd >= 0)
		return t;
	if (t->dir_fd >= 0)
		close(t->dir_fd);
	unlinkat(parent_fd, name, AT_REMOVEDIR);
	free(t);
	return NULL;
}

void tree_give(struct tree *t)
{
	/* Linux 6.18 kills what clone3(CLONE_INTO_CGROUP) puts into a cgroup that has ever seen cgroup.kill: it compares
	 * the kill count of the parent's cgroup with that of the target's. Seen: after one timeout every exec died. */
	if (t->killed || empty_count >= KEEP_EMPTY) {
		tree_free(t);
		return;
	}
	t->exec = NULL;
	t->next = empty;
	empty = t;
	empty_count++;
}

bool tree_is_empty(const struct tree *t)
{
	char text[128];
	ssize_t n = pread(t->events_fd, text, sizeof text - 1, 0);
	if (n <= 0)
		return false;
	text[n] = 0;
	return strstr(text, "populated 0") != NULL;
}

static void signal_members(const struct tree *t, int signum)
{
	int fd = openat(t->dir_fd, "cgroup.procs", O_RDONLY | O_CLOEXEC);
	FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;
	if (!file) {
		if (fd >= 0)
			close(fd);
		return;
	}
	int pid;
	while (fscanf(file, "%d", &pid) == 1)
		if (pid > 1)
			kill(pid, signum);
	fclose(file);
}

/* Parent and session of a process, from /proc/PID/stat; the name in it may hold anything, so look after the last ')'. */
static bool stat_of(pid_t pid, pid_t *parent, pid_t *session)
{
	char path[32], text[512];
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = 0;
	char *after = strrchr(text, ')');
	char state;
	int group;
	return after && sscanf(after + 1, " %c %d %d %d", &state, parent, &group, session) == 4 && state != 'Z';
}

static bool descends(pid_t pid, pid_t leader)
{
	pid_t parent, session;
	if (pid == leader)
		return true;
	for (int depth = 0; depth < 64 && pid > 1 && stat_of(pid, &parent, &session); depth++) {
		if (session == leader || parent == leader)
			return true;
		pid = parent;
	}
	return false;
}

static void walk(pid_t leader, int signum)
{
	int rounds = signum == SIGKILL ? WALK_ROUNDS : 1;
	bool found = true;
	while (found && rounds-- > 0) { /* again, for those that were forked meanwhile */
		found = false;
		DIR *dir = opendir("/proc");
		if (!dir)
			break;
		for (struct dirent *d = readdir(dir); d; d = readdir(dir)) {
			pid_t pid = (pid_t)atoi(d->d_name), parent, session;
			if (pid <= 1 || pid == getpid() || !stat_of(pid, &parent, &session) || !descends(pid, leader))
				continue;
			found = kill(pid, signum) == 0 || found;
		}
		closedir(dir);
	}
}

void tree_signal(struct tree *t, pid_t leader, int signum)
{
	if (!t) {
		walk(leader, signum);
		return;
	}
	if (signum != SIGKILL) {
		signal_members(t, signum);
		return;
	}
	t->killed = true;
	int fd = openat(t->dir_fd, "cgroup.kill", O_WRONLY | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, "1", 1) == 1;
	if (fd >= 0)
		close(fd);
	for (int round = 0; !done && round < WALK_ROUNDS && !tree_is_empty(t); round++)
		signal_members(t, signum); /* before Linux 5.14 */
}
