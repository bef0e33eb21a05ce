/* The operations that build the sandbox's root: overlay, fresh kernel file systems, masks, read-only binds, pivot.
 *
 * All of it runs as the host's root in a mount namespace owned by the initial user namespace, before the process enters
 * the sandbox's user namespace. So no capability that can be had inside ever suffices to undo a mask. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define OPTION_SEPARATOR '\x1f'
#define STRICT (RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS)
#define INSIDE (RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)

/* Hand options "k=v", "k=@id", "flag" to a file system context; copied, since fsconfig(2) wants NULs. */
static int set_options(struct launch *l, int fs, const char *options)
{
	char key[4096];
	while (*options) {
		const char *end = strchr(options, OPTION_SEPARATOR);
		size_t length = end ? (size_t)(end - options) : strlen(options);
		if (length >= sizeof(key)) {
			errno = EINVAL;
			return launch_fail(l, "mount option");
		}
		memcpy(key, options, length);
		key[length] = 0;
		char *value = strchr(key, '='), id[24];
		if (value)
			*value++ = 0;
		if (value && *value == '@') { /* an id of the sandbox, as the host sees it */
			snprintf(id, sizeof(id), "%llu", (unsigned long long)l->uid_base + strtoul(value + 1, NULL, 10));
			value = id;
		}
		if (fsconfig(fs, value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, key, value, 0))
			return launch_fail(l, "mount option");
		options += length + (end ? 1 : 0);
	}
	return 0;
}

/* A new detached mount of a new file system, fsopen(2), fsconfig(2), fsmount(2) (Linux 5.2). */
static int new_mount(struct launch *l, const char *type, const char *options, uint64_t attributes)
{
	int fs = fsopen(type, FSOPEN_CLOEXEC);
	if (fs < 0)
		return launch_fail(l, "fsopen");
	int mount = -1;
	fsconfig(fs, FSCONFIG_SET_STRING, "source", type, 0);
	if (set_options(l, fs, options) == 0) {
		if (fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0))
			launch_fail(l, "create file system");
		else if ((mount = fsmount(fs, FSMOUNT_CLOEXEC, (unsigned)attributes)) < 0)
			launch_fail(l, "fsmount");
	}
	int saved = errno;
	close(fs);
	errno = saved;
	return mount;
}

static int attach(struct launch *l, int mount, int target)
{
	if (move_mount(mount, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH))
		return launch_fail(l, "move_mount");
	return 0;
}

static int set_attributes(struct launch *l, int mount, uint64_t attributes)
{
	struct mount_attr attr = {.attr_set = attributes};
	if (attributes && mount_setattr(mount, "", AT_EMPTY_PATH, &attr, sizeof(attr)))
		return launch_fail(l, "mount_setattr");
	return 0;
}

int op_tmpfs_upper(struct launch *l, const struct op *op)
{
	char options[96];
	snprintf(options, sizeof(options), "size=%llu%cnr_inodes=%llu%cmode=700", (unsigned long long)op->f[0].number,
		 OPTION_SEPARATOR, (unsigned long long)op->f[1].number, OPTION_SEPARATOR);
	int mount = new_mount(l, "tmpfs", options, MOUNT_ATTR_NODEV);
	if (mount < 0)
		return -1;
	if (move_mount(mount, "", AT_FDCWD, SCRATCH_UPPER, MOVE_MOUNT_F_EMPTY_PATH))
		return launch_close(mount, launch_fail(l, "move_mount"));
	if (mkdirat(mount, LAYER_UPPER, 0755) || mkdirat(mount, LAYER_WORK, 0700))
		return launch_close(mount, launch_fail(l, "mkdir"));
	l->upper_fd = mount;
	return 0;
}

int op_disk_upper(struct launch *l, const struct op *op)
{
	int mount = launch_fd(l, op->f[0].number);
	if (mount < 0)
		return -1;
	if (move_mount(mount, "", AT_FDCWD, SCRATCH_UPPER, MOVE_MOUNT_F_EMPTY_PATH))
		return launch_fail(l, "move_mount");
	l->upper_fd = mount;
	return 0;
}

int op_idmap(struct launch *l, const struct op *op)
{
	int mount = launch_fd(l, op->f[0].number);
	struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)l->userns_fd};
	if (mount < 0 || mount_setattr(mount, "", AT_EMPTY_PATH, &attr, sizeof(attr)))
		return launch_fail(l, "mount_setattr");
	return 0;
}

/* The root of the upper layer is what stat("/") shows: it takes mode and owner of the image's root. */
static int copy_root_attributes(struct launch *l, int lower, int upper)
{
	struct stat root;
	if (fstat(lower, &root) || fchown(upper, root.st_uid, root.st_gid) || fchmod(upper, root.st_mode & 07777))
		return launch_fail(l, "upper root");
	return 0;
}

/* Layers by descriptor, which Linux 6.13 takes; the mount table inside then names no path. EINVAL: too old, and
 * EOPNOTSUPP: older than 6.5, whose overlayfs takes strings only. */
static int layers_by_fd(int fs, int lower, int upper, int work)
{
	return fsconfig(fs, FSCONFIG_SET_FD, "lowerdir+", NULL, lower) || fsconfig(fs, FSCONFIG_SET_FD, "upperdir", NULL, upper) ||
	       fsconfig(fs, FSCONFIG_SET_FD, "workdir", NULL, work) || fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
}

static int layers_by_path(int fs)
{
	return fsconfig(fs, FSCONFIG_SET_STRING, "lowerdir", SCRATCH_LOWER, 0) ||
	       fsconfig(fs, FSCONFIG_SET_STRING, "upperdir", SCRATCH_UPPER "/" LAYER_UPPER, 0) ||
	       fsconfig(fs, FSCONFIG_SET_STRING, "workdir", SCRATCH_UPPER "/" LAYER_WORK, 0) ||
	       fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
}

static int open_overlay(void)
{
	int fs = fsopen("overlay", FSOPEN_CLOEXEC);
	if (fs >= 0)
		fsconfig(fs, FSCONFIG_SET_STRING, "source", "overlay", 0);
	return fs;
}

int op_overlay(struct launch *l, const struct op *op)
{
	const int directory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
	int lower = launch_fd(l, op->f[0].number);
	int upper = openat(l->upper_fd, LAYER_UPPER, directory), work = openat(l->upper_fd, LAYER_WORK, directory);
	if (lower < 0 || upper < 0 || work < 0)
		return launch_fail(l, "layers");
	/* Attached, because overlayfs refuses detached layers before Linux 6.15, and because the last close of a detached
	 * mount waits for a grace period of a millisecond or two. */
	if (move_mount(lower, "", AT_FDCWD, SCRATCH_LOWER, MOVE_MOUNT_F_EMPTY_PATH))
		return launch_fail(l, "move_mount");
	int fs = copy_root_attributes(l, lower, upper) ? -1 : open_overlay();
	if (fs < 0)
		return launch_fail(l, "fsopen");
	if (layers_by_fd(fs, lower, upper, work)) {
		bool old = errno == EINVAL || errno == EOPNOTSUPP;
		close(fs);
		fs = old ? open_overlay() : -1;
		if (fs < 0 || layers_by_path(fs))
			return launch_fail(l, "create file system");
	}
	close(upper);
	close(work);
	int mount = fsmount(fs, FSMOUNT_CLOEXEC, (unsigned)op->f[1].number);
	launch_close(fs, 0);
	if (mount < 0)
		return launch_fail(l, "fsmount");
	if (move_mount(mount, "", AT_FDCWD, SCRATCH_ROOT, MOVE_MOUNT_F_EMPTY_PATH))
		return launch_close(mount, launch_fail(l, "move_mount"));
	l->root_fd = mount;
	return 0;
}

int op_mount(struct launch *l, const struct op *op)
{
	const char *type = op->f[0].data, *target = op->f[1].data;
	int mount = new_mount(l, type, op->f[2].data, op->f[3].number);
	if (mount < 0)
		return -1;
	int at = root_make(l, target, (uint32_t)op->f[4].number, 0);
	/* A link in the image must not steer proc or sysfs elsewhere: only secrets and the like may lie behind links. */
	if (at >= 0 && !op->f[5].number) {
		close(at);
		at = root_open(l, target, O_PATH | O_DIRECTORY, STRICT);
	}
	if (at < 0)
		return launch_close(mount, -1);
	int result = attach(l, mount, at);
	launch_close(at, 0);
	if (result == 0 && strcmp(type, "proc") == 0) {
		l->sysctl_fd = openat(mount, "sys", O_PATH | O_DIRECTORY | O_CLOEXEC);
		if (l->sysctl_fd < 0)
			result = launch_fail(l, "sys");
	}
	return launch_close(mount, result);
}

int op_bind(struct launch *l, const struct op *op)
{
	int mount = launch_fd(l, op->f[0].number);
	struct stat source;
	if (mount < 0 || fstat(mount, &source))
		return launch_fail(l, "source");
	if (!S_ISDIR(source.st_mode) && !S_ISREG(source.st_mode)) {
		errno = EINVAL;
		return launch_fail(l, "source is neither directory nor file");
	}
	if (set_attributes(l, mount, op->f[2].number))
		return -1;
	int at = root_make(l, op->f[1].data, S_ISDIR(source.st_mode) ? 0755 : 0644, !S_ISDIR(source.st_mode));
	if (at < 0)
		return -1;
	return launch_close(at, attach(l, mount, at));
}

/* 0 when fd lies where its path says: below /proc on procfs, below /sys on sysfs or what is mounted there. */
static int expect_kernel_fs(struct launch *l, int fd, const char *path)
{
	struct statfs fs;
	if (strncmp(path, "/proc/", 6))
		return 0;
	if (fstatfs(fd, &fs))
		return launch_fail(l, path);
	if (fs.f_type != PROC_SUPER_MAGIC) {
		errno = EXDEV;
		return launch_fail(l, path);
	}
	return 0;
}

int op_mask(struct launch *l, const struct op *op)
{
	const char *path = op->f[0].data;
	int at = root_open(l, path, O_PATH | O_NOFOLLOW, STRICT);
	if (at < 0) {
		l->detail = errno == ENOENT || errno == ENOTDIR ? NULL : l->detail;
		return l->detail ? -1 : 0;
	}
	struct stat st;
	if (fstat(at, &st) || expect_kernel_fs(l, at, path))
		return launch_close(at, launch_fail(l, path));
	/* Our own node 1:3 and our own empty directory, not what the image calls /dev/null (CVE-2025-31133). */
	const char *source = S_ISDIR(st.st_mode) ? SCRATCH_EMPTY : SCRATCH_NULL;
	int mount = open_tree(AT_FDCWD, source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
	if (mount < 0)
		return launch_close(at, launch_fail(l, "open_tree"));
	uint64_t attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
	int result = set_attributes(l, mount, attributes) || attach(l, mount, at) ? -1 : 0;
	launch_close(at, 0);
	return launch_close(mount, result);
}

int op_readonly(struct launch *l, const struct op *op)
{
	const char *path = op->f[0].data;
	int required = op->f[1].number != 0;
	int at = root_open(l, path, O_PATH, required ? INSIDE : STRICT);
	if (at < 0) {
		if (!required && (errno == ENOENT || errno == ENOTDIR)) {
			l->detail = NULL;
			return 0;
		}
		return -1;
	}
	if (expect_kernel_fs(l, at, path))
		return launch_close(at, -1);
	int mount = open_tree(at, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
	if (mount < 0)
		return launch_close(at, launch_fail(l, "open_tree"));
	int result = set_attributes(l, mount, op->f[2].number) || attach(l, mount, at) ? -1 : 0;
	launch_close(at, 0);
	return launch_close(mount, result);
}

int op_remount(struct launch *l, const struct op *op)
{
	int at = root_open(l, op->f[0].data, O_PATH | O_DIRECTORY, INSIDE);
	if (at < 0)
		return -1;
	return launch_close(at, set_attributes(l, at, op->f[1].number));
}

/* Take the root. The mount is moved over the launcher's empty tmpfs rather than pivoted: to unmount an old root costs a
 * grace period of a millisecond, and there is nothing in that one to hide. ".." stops at the mount's root, since below
 * lies only the root of the namespace (path_lookup, choose_mountpoint), and to move or unmount takes CAP_SYS_ADMIN in
 * the host's user namespace, which owns this mount namespace. */
int op_root(struct launch *l, const struct op *op)
{
	(void)op;
	if (fchdir(l->root_fd))
		return launch_fail(l, "chdir");
	if (move_mount(l->root_fd, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH))
		return launch_fail(l, "move_mount");
	return chroot(".") || chdir("/") ? launch_fail(l, "chroot") : 0;
}
