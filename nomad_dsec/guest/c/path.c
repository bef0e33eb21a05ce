/* Paths, resolved by the kernel inside the root. Part of workers. */
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "work.h"

#define RACE_TRIES 256
#define LINKS_MAX 40

static int open_how(int dir, const char *path, uint64_t flags, unsigned mode, uint64_t resolve)
{
	/* openat2 refuses O_PATH beside flags that mean nothing to it */
	uint64_t extra = flags & O_PATH ? O_CLOEXEC : O_CLOEXEC | O_NOCTTY;
	struct open_how how = {.flags = flags | extra, .resolve = resolve | RESOLVE_NO_MAGICLINKS};
	if (flags & (O_CREAT | __O_TMPFILE))
		how.mode = mode;
	int fd = -1;
	for (int tries = 0; tries < RACE_TRIES; tries++) { /* EAGAIN: a rename raced with a ".." */
		fd = (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
		if (fd >= 0 || (errno != EAGAIN && errno != EINTR))
			break;
	}
	return fd;
}

int path_open(const char *path, uint64_t flags, unsigned mode)
{
	return open_how(work_root, path, flags, mode, RESOLVE_IN_ROOT);
}

int path_open_below(int dir, const char *path, uint64_t flags, unsigned mode)
{
	return open_how(dir, path, flags, mode, RESOLVE_BENEATH);
}

/* Where the last name of a path begins; trailing slashes are cut off. NULL when there is no such name. */
static char *last_name(char *path)
{
	size_t n = strlen(path);
	while (n > 1 && path[n - 1] == '/')
		path[--n] = 0;
	char *slash = strrchr(path, '/');
	char *name = slash ? slash + 1 : path;
	return *name && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 ? name : NULL;
}

int path_dirs(const char *path)
{
	char copy[4096];
	int fd = path_open("/", O_PATH | O_DIRECTORY, 0);
	strcpy(copy, path);
	for (char *at = copy; fd >= 0;) {
		at += strspn(at, "/");
		if (!*at)
			return fd;
		char *end = at + strcspn(at, "/");
		char kept = *end;
		*end = 0;
		/* By the whole path each time: a link on the way leads where it leads for the kernel, inside the root. */
		int next = path_open(copy, O_PATH | O_DIRECTORY, 0);
		if (next < 0 && errno == ENOENT && (mkdirat(fd, at, 0755) == 0 || errno == EEXIST))
			next = path_open(copy, O_PATH | O_DIRECTORY, 0);
		int error = errno;
		close(fd);
		errno = error;
		fd = next;
		*end = kept;
		at = end;
	}
	return fd;
}

int path_parent(const char *path, char name[256], bool make_parents)
{
	char copy[4096];
	strcpy(copy, path);
	char *last = last_name(copy);
	if (!last) {
		errno = EINVAL;
		return -1;
	}
	if (strlen(last) > 255) {
		errno = ENAMETOOLONG;
		return -1;
	}
	strcpy(name, last);
	if (last == copy)
		strcpy(copy, "/");
	else
		*last = 0;
	int fd = path_open(copy, O_PATH | O_DIRECTORY, 0);
	if (fd < 0 && errno == ENOENT && make_parents)
		fd = path_dirs(copy);
	return fd;
}

bool path_final(char path[4096])
{
	char name[256], link[4096];
	for (int links = 0; links < LINKS_MAX; links++) {
		int dir = path_parent(path, name, false);
		if (dir < 0)
			return errno == ENOENT; /* the parents may be made later */
		ssize_t n = readlinkat(dir, name, link, sizeof link - 1);
		close(dir);
		if (n < 0)
			return true;
		link[n] = 0;
		char *last = last_name(path);
		size_t before = link[0] == '/' ? 0 : (size_t)(last - path);
		if (before + (size_t)n >= 4096) {
			errno = ENAMETOOLONG;
			return false;
		}
		memcpy(path + before, link, (size_t)n + 1);
	}
	errno = ELOOP;
	return false;
}

void path_field(struct span payload, uint16_t tag, char out[4096])
{
	struct span value;
	const char *field = field_name(tag);
	if (!field_find(payload, tag, &value) || value.size == 0 || memchr(value.at, 0, value.size))
		work_fail("bad_field", field, 0, "a path of 1 to 4095 bytes without NUL");
	if (value.size > 4095)
		work_fail("name_too_long", field, ENAMETOOLONG, "a path of 1 to 4095 bytes without NUL");
	memcpy(out, value.at, value.size);
	out[value.size] = 0;
}

const char *error_code(int error)
{
	switch (error) {
	case ENOENT:
		return "not_found";
	case EEXIST:
		return "exists";
	case ENOTDIR:
		return "not_a_directory";
	case EISDIR:
		return "is_a_directory";
	case ENOTEMPTY:
		return "not_empty";
	case EACCES:
	case EPERM:
		return "denied";
	case EROFS:
		return "read_only";
	case ENOSPC:
	case EDQUOT:
		return "no_space";
	case ENAMETOOLONG:
		return "name_too_long";
	case ELOOP:
		return "too_many_links";
	case EXDEV:
		return "cross_device";
	case EFBIG:
		return "too_large";
	case ENOMEM:
		return "no_memory";
	case ENXIO:
	case ENODEV:
		return "not_regular";
	case EINVAL:
		return "bad_field";
	case ENOSYS:
	case EOPNOTSUPP:
		return "not_supported";
	default:
		return "io_error";
	}
}

void temp_name(char name[32])
{
	uint8_t random[10] = {0};
	if (getrandom(random, sizeof random, GRND_NONBLOCK) < 0)
		memcpy(random, &(pid_t){getpid()}, sizeof(pid_t));
	strcpy(name, ".dsec-");
	for (size_t i = 0; i < sizeof random; i++)
		sprintf(name + 6 + 2 * i, "%02x", random[i]);
}

ssize_t write_all(int fd, const uint8_t *bytes, size_t n)
{
	size_t done = 0;
	while (done < n) {
		ssize_t wrote = write(fd, bytes + done, n - done);
		if (wrote < 0 && errno == EINTR)
			continue;
		if (wrote < 0)
			return -1;
		done += (size_t)wrote;
	}
	return (ssize_t)done;
}

const char *mode_kind(mode_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFREG:
		return "file";
	case S_IFDIR:
		return "dir";
	case S_IFLNK:
		return "symlink";
	case S_IFIFO:
		return "fifo";
	case S_IFSOCK:
		return "socket";
	case S_IFCHR:
		return "char";
	case S_IFBLK:
		return "block";
	default:
		return "other";
	}
}

void put_entry(const char *name, const struct stat *st, int dir)
{
	struct buffer *b = &work_out;
	size_t entry = nest_begin(b, T_ENTRY);
	put_string(b, T_NAME, name);
	put_string(b, T_KIND, mode_kind(st->st_mode));
	put_int(b, T_SIZE, (uint64_t)st->st_size);
	put_int(b, T_MODE, st->st_mode & 07777);
	put_int(b, T_UID, st->st_uid);
	put_int(b, T_GID, st->st_gid);
	put_int(b, T_MTIME_NS, (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec);
	put_int(b, T_NLINK, st->st_nlink);
	if (S_ISLNK(st->st_mode)) {
		char link[4096];
		ssize_t n = readlinkat(dir, name, link, sizeof link);
		put_bytes(b, T_LINK, link, n > 0 ? (size_t)n : 0);
	}
	nest_end(b, entry);
}
