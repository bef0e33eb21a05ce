/* Verbs on single files and directories. Part of workers. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "work.h"

#define LIST_PIECE (32u * 1024)
#define REMOVE_DEPTH 100
#define REMOVE_ROUNDS 100000

static char path[4096], name[256];

_Noreturn void file_read(struct span payload)
{
	static uint8_t piece[MAX_DATA];
	struct stat st;
	uint64_t left = field_int(payload, T_LENGTH, UINT64_MAX), sent = 0, offset = field_int(payload, T_OFFSET, 0);
	path_field(payload, T_PATH, path);
	int fd = path_open(path, O_RDONLY | O_NONBLOCK, 0); /* O_NONBLOCK: a FIFO must not hold us up */
	if (fd < 0 || fstat(fd, &st) != 0)
		work_fail_errno("path", errno);
	if (S_ISDIR(st.st_mode))
		work_fail_errno("path", EISDIR);
	if (!S_ISREG(st.st_mode))
		work_fail("not_regular", "path", 0, "not a regular file");
	if (offset > INT64_MAX || lseek(fd, (off_t)offset, SEEK_SET) < 0)
		work_fail_errno("offset", EINVAL);
	size_t frame = frame_begin(&work_out, FR_ITEM, 0);
	put_int(&work_out, T_SIZE, (uint64_t)st.st_size);
	put_int(&work_out, T_MODE, st.st_mode & 07777);
	frame_end(&work_out, frame);
	work_send_credited();
	while (left > 0) {
		ssize_t n = read(fd, piece, left < sizeof piece ? (size_t)left : sizeof piece);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			work_fail_errno("path", errno);
		if (n == 0)
			break;
		work_data(piece, (size_t)n);
		sent += (uint64_t)n;
		left -= (uint64_t)n;
	}
	frame = frame_begin(&work_out, FR_OK, 0);
	put_int(&work_out, T_SIZE, sent);
	frame_end(&work_out, frame);
	work_send();
	work_done();
}

_Noreturn void file_list(struct span payload)
{
	path_field(payload, T_PATH, path);
	int fd = path_open(path, O_RDONLY | O_DIRECTORY, 0);
	DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
	if (!dir)
		work_fail_errno("path", errno);
	size_t frame = frame_begin(&work_out, FR_ITEM, 0);
	for (struct dirent *d = readdir(dir); d; d = readdir(dir)) {
		struct stat st;
		if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
			continue;
		if (fstatat(fd, d->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
			continue; /* gone meanwhile */
		put_entry(d->d_name, &st, fd);
		if (buffer_size(&work_out) > LIST_PIECE) {
			frame_end(&work_out, frame);
			work_send_credited();
			frame = frame_begin(&work_out, FR_ITEM, 0);
		}
	}
	frame_end(&work_out, frame);
	work_send_credited();
	work_ok();
}

_Noreturn void file_stat(struct span payload)
{
	struct stat st;
	path_field(payload, T_PATH, path);
	bool follow = field_int(payload, T_FOLLOW, 1) != 0;
	int fd = path_open(path, (uint64_t)O_PATH | (follow ? 0u : (unsigned)O_NOFOLLOW), 0);
	if (fd < 0 || fstat(fd, &st) != 0)
		work_fail_errno("path", errno);
	char *slash = strrchr(path, '/');
	size_t frame = frame_begin(&work_out, FR_OK, 0);
	int dir = -1;
	if (S_ISLNK(st.st_mode)) /* put_entry reads the link by name */
		dir = path_parent(path, name, false);
	put_entry(slash && slash[1] ? slash + 1 : path, &st, dir);
	frame_end(&work_out, frame);
	work_send();
	work_done();
}

_Noreturn void file_mkdir(struct span payload)
{
	struct stat st;
	path_field(payload, T_PATH, path);
	bool parents = field_int(payload, T_PARENTS, 0) != 0;
	unsigned mode = (unsigned)field_int(payload, T_MODE, 0755);
	if (mode > 07777)
		work_fail("bad_field", "mode", 0, "at most 07777");
	int dir = path_parent(path, name, parents);
	if (dir < 0 && errno == EINVAL && parents)
		work_ok(); /* "/" is there */
	if (dir < 0)
		work_fail_errno("path", errno == EINVAL ? EEXIST : errno);
	if (mkdirat(dir, name, mode) == 0) {
		if (fchmodat(dir, name, mode, 0) != 0) /* whatever the umask */
			work_fail_errno("path", errno);
		work_ok();
	}
	int error = errno;
	int fd = error == EEXIST && parents ? path_open(path, O_PATH | O_DIRECTORY, 0) : -1;
	if (fd < 0 || fstat(fd, &st) != 0)
		work_fail_errno("path", error);
	work_ok();
}

_Noreturn void file_chmod(struct span payload)
{
	char self[64];
	path_field(payload, T_PATH, path);
	unsigned mode = (unsigned)field_int(payload, T_MODE, UINT32_MAX);
	if (mode > 07777)
		work_fail("bad_field", "mode", 0, "needed, at most 07777");
	/* By the descriptor, so that nothing can be put in its place between looking and changing. Devices and the like
	 * must not be opened for that: O_PATH, and its name in /proc. */
	int fd = path_open(path, O_PATH, 0);
	if (fd < 0)
		work_fail_errno("path", errno);
	snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
	if (chmod(self, mode) != 0) {
		int error = errno;
		int plain = error == ENOENT ? path_open(path, O_RDONLY | O_NONBLOCK, 0) : -1; /* no /proc */
		if (plain < 0 || fchmod(plain, mode) != 0)
			work_fail_errno("path", error);
	}
	work_ok();
}

/* Empty a directory. What lies deeper than we have descriptors for is moved to the top first, for another round. */
static int empty_dir(int dir_fd, int top, int depth)
{
	DIR *dir = fdopendir(dir_fd);
	int result = 0;
	if (!dir) {
		int error = errno;
		close(dir_fd);
		errno = error;
		return -1;
	}
	for (struct dirent *d = readdir(dir); d && result == 0; d = readdir(dir)) {
		if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
			continue;
		if (unlinkat(dir_fd, d->d_name, 0) == 0 || errno == ENOENT)
			continue;
		if (errno != EISDIR && errno != EPERM) {
			result = -1;
			break;
		}
		if (depth >= REMOVE_DEPTH) {
			char moved[32];
			temp_name(moved);
			result = renameat(dir_fd, d->d_name, top, moved);
			continue;
		}
		int child = openat(dir_fd, d->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (child >= 0)
			result = empty_dir(child, top, depth + 1);
		if (child >= 0 && result == 0)
			result = unlinkat(dir_fd, d->d_name, AT_REMOVEDIR);
		if (result != 0 && (errno == ENOTEMPTY || errno == ENOENT)) /* somebody is making new ones: another round */
			result = 0;
		if (child < 0 && errno != ENOENT)
			result = -1;
	}
	int error = errno;
	closedir(dir);
	errno = error;
	return result;
}

int remove_tree(int dir, const char *entry)
{
	for (int round = 0; round < REMOVE_ROUNDS; round++) {
		if (unlinkat(dir, entry, AT_REMOVEDIR) == 0 || errno == ENOENT)
			return 0;
		if (errno == ENOTDIR)
			return unlinkat(dir, entry, 0);
		if (errno != ENOTEMPTY && errno != EEXIST)
			return -1;
		int top = openat(dir, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		int walk = top >= 0 ? dup(top) : -1;
		int result = walk >= 0 ? empty_dir(walk, top, 0) : -1;
		int error = errno;
		if (top >= 0)
			close(top);
		errno = error;
		if (result != 0)
			return -1;
	}
	errno = EBUSY;
	return -1;
}

_Noreturn void file_remove(struct span payload)
{
	path_field(payload, T_PATH, path);
	bool missing_ok = field_int(payload, T_MISSING_OK, 0) != 0, recursive = field_int(payload, T_RECURSIVE, 0) != 0;
	int dir = path_parent(path, name, false);
	if (dir < 0 && missing_ok && (errno == ENOENT || errno == ENOTDIR))
		work_ok();
	if (dir < 0)
		work_fail_errno("path", errno);
	int result = unlinkat(dir, name, 0);
	if (result != 0 && (errno == EISDIR || errno == EPERM))
		result = recursive ? remove_tree(dir, name) : unlinkat(dir, name, AT_REMOVEDIR);
	if (result != 0 && !(missing_ok && errno == ENOENT))
		work_fail_errno("path", errno);
	work_ok();
}
