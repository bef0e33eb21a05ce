/* Paths inside the sandbox while it is being built. The image is hostile: its links and nodes are never trusted, so
 * every path is resolved by openat2(2) (Linux 5.6) below the sandbox's root and acted on through the descriptor. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RACE_TRIES 4096

#define MAX_PATH 4096

int launch_fail(struct launch *l, const char *what)
{
	if (!l->detail)
		l->detail = what;
	return -1;
}

int launch_close(int fd, int result)
{
	int saved = errno;
	close(fd);
	errno = saved;
	return result;
}

int launch_fd(struct launch *l, uint64_t index)
{
	if (index >= (uint64_t)l->nfds) {
		errno = EBADF;
		return launch_fail(l, "descriptor index");
	}
	return l->fds[index];
}

int root_open(struct launch *l, const char *path, uint64_t flags, uint64_t resolve)
{
	struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = resolve};
	while (*path == '/')
		path++;
	int fd = -1;
	/* EAGAIN: a mount or rename anywhere on the host came between the steps of a ".."; the kernel asks to try again. */
	for (int tries = 0; tries < RACE_TRIES; tries++) {
		fd = (int)syscall(SYS_openat2, l->root_fd, *path ? path : ".", &how, sizeof(how));
		if (fd >= 0 || (errno != EAGAIN && errno != EINTR))
			break;
	}
	return fd < 0 ? launch_fail(l, path) : fd;
}

/* Make one missing name below `parent`, owned by the sandbox's root. */
static int make_one(struct launch *l, int parent, const char *name, uint32_t mode, int want_file)
{
	if (want_file) {
		int fd = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
		if (fd < 0)
			return launch_fail(l, "create");
		close(fd);
	} else if (mkdirat(parent, name, mode)) {
		return launch_fail(l, "mkdir");
	}
	return fchownat(parent, name, (uid_t)l->uid_base, (gid_t)l->uid_base, AT_SYMLINK_NOFOLLOW) ? launch_fail(l, "chown") : 0;
}

/* O_PATH on path, with missing parts made; links of the image are followed inside its root only. */
int root_make(struct launch *l, const char *path, uint32_t mode, int want_file)
{
	const uint64_t resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS;
	char part[MAX_PATH];
	size_t length = strlen(path);
	if (length >= sizeof(part)) {
		errno = ENAMETOOLONG;
		return launch_fail(l, "path");
	}
	int fd = root_open(l, path, O_PATH, resolve);
	if (fd >= 0 || errno != ENOENT)
		return fd;
	l->detail = NULL;
	int parent = root_open(l, "/", O_PATH | O_DIRECTORY, resolve);
	for (size_t i = 0; parent >= 0 && i < length;) {
		while (path[i] == '/')
			i++;
		size_t end = i;
		while (end < length && path[end] != '/')
			end++;
		if (end == i)
			break;
		memcpy(part, path, end);
		part[end] = 0;
		fd = root_open(l, part, O_PATH, resolve);
		if (fd < 0 && errno == ENOENT) {
			l->detail = NULL;
			memcpy(part, path + i, end - i);
			part[end - i] = 0;
			int last = end + strspn(path + end, "/") == length;
			if (make_one(l, parent, part, last ? mode : 0755, last && want_file)) {
				close(parent);
				return -1;
			}
			fd = openat(parent, part, O_PATH | O_NOFOLLOW | O_CLOEXEC);
		}
		close(parent);
		parent = fd;
		i = end;
	}
	return parent;
}

/* O_PATH on the directory of path (which must exist); *name is its last component. */
int root_open_parent(struct launch *l, const char *path, const char **name)
{
	char parent[MAX_PATH];
	const char *slash = strrchr(path, '/');
	size_t length = slash ? (size_t)(slash - path) : 0;
	*name = slash ? slash + 1 : path;
	if (length >= sizeof(parent) || !**name) {
		errno = EINVAL;
		return launch_fail(l, "path");
	}
	memcpy(parent, path, length);
	parent[length] = 0;
	return root_open(l, parent, O_PATH | O_DIRECTORY, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
}
