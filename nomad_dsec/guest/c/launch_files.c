/* The operations that make entries in the sandbox's root: device nodes, links, small files, and pinned names. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define STRICT (RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS)

int op_mknod(struct launch *l, const struct op *op)
{
	const char *name;
	int dir = root_open_parent(l, op->f[0].data, &name);
	if (dir < 0)
		return -1;
	dev_t device = makedev((unsigned)op->f[2].number, (unsigned)op->f[3].number);
	int result = mknodat(dir, name, S_IFCHR | (mode_t)op->f[1].number, device) ||
			     fchownat(dir, name, (uid_t)l->uid_base, (gid_t)l->uid_base, AT_SYMLINK_NOFOLLOW)
		       ? launch_fail(l, op->f[0].data) : 0;
	return launch_close(dir, result);
}

int op_symlink(struct launch *l, const struct op *op)
{
	const char *name;
	int dir = root_open_parent(l, op->f[0].data, &name);
	if (dir < 0)
		return -1;
	int result = symlinkat(op->f[1].data, dir, name) ||
			     fchownat(dir, name, (uid_t)l->uid_base, (gid_t)l->uid_base, AT_SYMLINK_NOFOLLOW)
		       ? launch_fail(l, op->f[0].data) : 0;
	return launch_close(dir, result);
}

static int write_whole(int fd, const char *data, size_t length)
{
	while (length) {
		ssize_t wrote = write(fd, data, length);
		if (wrote <= 0)
			return -1;
		data += wrote;
		length -= (size_t)wrote;
	}
	return 0;
}

/* Write a small file. Never follows a link at its end: an image's link is replaced when bit 0 of the last field allows
 * it. From bit 8 on stands the uid inside of its owner. */
int op_file(struct launch *l, const struct op *op)
{
	const char *path = op->f[0].data, *name = strrchr(path, '/');
	char parent[4096];
	size_t length = name ? (size_t)(name - path) : 0;
	if (!name || !name[1] || length >= sizeof(parent)) {
		errno = EINVAL;
		return launch_fail(l, path);
	}
	memcpy(parent, path, length);
	parent[length] = 0;
	int dir = root_make(l, parent, 0755, 0);
	if (dir < 0)
		return -1;
	/* What is there and no plain file (a link, a device, a FIFO of the image) is replaced, never opened. */
	struct stat st;
	int replace = (op->f[3].number & 1) != 0;
	int there = replace && fstatat(dir, name + 1, &st, AT_SYMLINK_NOFOLLOW) == 0;
	if (there && !S_ISREG(st.st_mode)) {
		if (unlinkat(dir, name + 1, 0))
			return launch_close(dir, launch_fail(l, path));
		there = 0;
	}
	int flags = O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (there ? O_TRUNC : O_CREAT | O_EXCL);
	int fd = openat(dir, name + 1, flags, (mode_t)op->f[2].number);
	launch_close(dir, 0);
	if (fd < 0)
		return launch_fail(l, path);
	uid_t owner = (uid_t)(l->uid_base + (op->f[3].number >> 8 & 0xffff));
	int result = fchown(fd, owner, (gid_t)l->uid_base) || fchmod(fd, (mode_t)op->f[2].number) ||
		     write_whole(fd, op->f[1].data, op->f[1].length) ? launch_fail(l, path) : 0;
	return launch_close(fd, result);
}

static mode_t pinned_mode(mode_t mode)
{
	/* The group stands for the owner that was: a directory of mode 0700 stays open to inside's root. */
	return (mode & 07777) | 01020 | (mode & 0700) >> 3;
}

/* Nobody inside may rename or remove `name` in `dir`: it and its directory belong to nobody that exists inside, the
 * directory is sticky, and inside's root keeps the right to make entries through its group. Without this a read-only
 * /usr/bin/bash is worth nothing, since /bin, a link, can be replaced by a directory. */
static int pin_one(struct launch *l, int dir, const char *name)
{
	struct stat parent, entry;
	if (fstat(dir, &parent) || fstatat(dir, name, &entry, AT_SYMLINK_NOFOLLOW))
		return launch_fail(l, name);
	gid_t base = (gid_t)l->uid_base;
	if (parent.st_uid != 0 && (fchown(dir, 0, base) || fchmod(dir, pinned_mode(parent.st_mode))))
		return launch_fail(l, name);
	if (!S_ISREG(entry.st_mode) && entry.st_uid != 0 &&
	    (fchownat(dir, name, 0, base, AT_SYMLINK_NOFOLLOW) ||
	     (S_ISDIR(entry.st_mode) && fchmodat(dir, name, pinned_mode(entry.st_mode), 0))))
		return launch_fail(l, name);
	return 0;
}

/* Pin each component of the path, links too, following links as the kernel does inside the sandbox's root. */
int op_pin(struct launch *l, const struct op *op)
{
	char todo[4096], next[4096], done[4096] = "/";
	if (op->f[0].length >= sizeof(todo)) {
		errno = ENAMETOOLONG;
		return launch_fail(l, "path");
	}
	memcpy(todo, op->f[0].data, op->f[0].length + 1);
	for (int steps = 0; steps < 256; steps++) {
		char *name = todo + strspn(todo, "/");
		size_t length = strcspn(name, "/");
		if (!length)
			return 0;
		char part[256], link[2048];
		if (length >= sizeof(part))
			break;
		memcpy(part, name, length);
		part[length] = 0;
		char *rest = name + length;
		if (!strcmp(part, ".") || !strcmp(part, "..")) {
			char *slash = strrchr(done, '/');
			if (part[1] == '.')
				slash[slash == done] = 0;
			memmove(todo, rest, strlen(rest) + 1);
			continue;
		}
		int dir = root_open(l, done, O_RDONLY | O_DIRECTORY, STRICT);
		if (dir < 0)
			return -1;
		int result = pin_one(l, dir, part);
		ssize_t got = result ? -1 : readlinkat(dir, part, link, sizeof(link) - 1);
		launch_close(dir, 0);
		if (result)
			return -1;
		int wrote;
		if (got > 0) {
			link[got] = 0;
			wrote = snprintf(next, sizeof(next), "%s/%s", link, rest);
			if (link[0] == '/')
				strcpy(done, "/");
		} else {
			size_t used = strlen(done);
			if (used + length + 2 >= sizeof(done))
				break;
			snprintf(done + used, sizeof(done) - used, "%s%s", done[1] ? "/" : "", part);
			wrote = snprintf(next, sizeof(next), "%s", rest);
		}
		if (wrote < 0 || (size_t)wrote >= sizeof(next))
			break;
		memcpy(todo, next, (size_t)wrote + 1);
	}
	errno = ELOOP;
	return launch_fail(l, op->f[0].data);
}
