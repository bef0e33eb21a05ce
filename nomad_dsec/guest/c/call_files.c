/* Files into a call's work directory and out of it, by descriptor of that directory, which lies in the call's own mount
 * namespace. Before the call only we write there; afterwards every name in it is hostile. */
#include "call.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int make_parent(int dir, const char *part)
{
	if (mkdirat(dir, part, 0755) == 0) {
		if (fchownat(dir, part, CALL_USER, CALL_USER, AT_SYMLINK_NOFOLLOW))
			return -1;
	} else if (errno != EEXIST) {
		return -1;
	}
	return openat(dir, part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* The directory that holds the last component of `name`, made when missing; *last is that component. -1: errno. */
static int parent_of(int dir, char *name, char **last)
{
	int at = dup(dir);
	for (;;) {
		char *slash = strchr(name, '/');
		if (slash)
			*slash = 0;
		if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
			close(at);
			errno = EINVAL;
			return -1;
		}
		if (!slash) {
			*last = name;
			return at;
		}
		int next = at < 0 ? -1 : make_parent(at, name);
		int saved = errno;
		close(at);
		errno = saved;
		if (next < 0)
			return -1;
		at = next;
		name = slash + 1;
	}
}

static int write_all(int fd, const uint8_t *at, uint64_t size)
{
	while (size) {
		ssize_t n = write(fd, at, size);
		if (n < 0 && errno != EINTR)
			return -1;
		if (n > 0) {
			at += n;
			size -= (uint64_t)n;
		}
	}
	return 0;
}

static int put_one(int dir, char *name, uint32_t mode, const uint8_t *data, uint64_t size)
{
	char *last;
	int parent = parent_of(dir, name, &last);
	if (parent < 0)
		return errno;
	int error = 0;
	int fd = openat(parent, last, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode & 0777);
	if (fd < 0 || write_all(fd, data, size) || fchown(fd, CALL_USER, CALL_USER) || fchmod(fd, mode & 0777))
		error = errno;
	if (fd >= 0)
		close(fd);
	close(parent);
	return error;
}

int files_put(int dir, const struct call *c)
{
	const uint8_t *at = c->files_at, *from, *data;
	for (uint32_t i = 0; i < c->r.filec; i++) {
		struct call_file f;
		char name[CALL_NAME_ROOM];
		if (!call_next_file(c, &at, &f, &from, &data))
			return EPROTO;
		memcpy(name, from, f.name_bytes);
		name[f.name_bytes] = 0;
		int error = put_one(dir, name, f.mode, data, f.size);
		if (error)
			return error;
	}
	return 0;
}

static void put_record(struct bytes *out, const char *name, uint32_t error, uint64_t size, const uint8_t *data)
{
	struct call_file f = {.name_bytes = (uint32_t)strlen(name), .mode = error, .size = size};
	bytes_add(out, &f, sizeof f);
	bytes_add(out, name, f.name_bytes);
	if (size)
		bytes_add(out, data, size);
}

/* Links, FIFOs and what would not fit are named with an errno instead of contents; size is what may still be taken. */
static uint64_t fetch_one(int dir, const char *name, uint64_t room, struct bytes *out)
{
	struct open_how how = {
	    .flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | O_NOFOLLOW,
	    .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV,
	};
	struct stat st;
	int fd = (int)syscall(SYS_openat2, dir, name, &how, sizeof how);
	uint32_t error = fd < 0 ? (uint32_t)errno : 0;
	if (!error && fstat(fd, &st))
		error = (uint32_t)errno;
	if (!error && !S_ISREG(st.st_mode))
		error = EINVAL;
	if (!error && (uint64_t)st.st_size > room)
		error = EFBIG;
	size_t size = error ? 0 : (size_t)st.st_size, got = 0;
	struct bytes data = {0};
	uint8_t *at = size ? bytes_room(&data, size) : NULL;
	if (size && !at)
		error = ENOMEM;
	while (!error && got < size) {
		ssize_t n = read(fd, at + got, size - got);
		if (n <= 0)
			break;
		got += (size_t)n;
	}
	put_record(out, name, error, error ? 0 : got, data.at);
	bytes_free(&data);
	if (fd >= 0)
		close(fd);
	return error ? 0 : got;
}

static uint64_t fetch_pattern(int dir, const char *pattern, uint64_t room, struct bytes *out, uint32_t *count)
{
	uint64_t taken = 0;
	int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *list = fd < 0 ? NULL : fdopendir(fd);
	if (!list) {
		if (fd >= 0)
			close(fd);
		return 0;
	}
	for (struct dirent *d = readdir(list); d && *count < CALL_FILES_MAX; d = readdir(list)) {
		if (fnmatch(pattern, d->d_name, FNM_PERIOD) != 0)
			continue;
		taken += fetch_one(dir, d->d_name, room - taken, out);
		++*count;
	}
	closedir(list);
	return taken;
}

uint32_t files_fetch(int dir, const struct call *c, struct bytes *out)
{
	uint64_t room = c->r.fetch_bytes;
	uint32_t count = 0;
	for (uint32_t i = 0; i < c->r.fetchc && count < CALL_FILES_MAX; i++) {
		if (strchr(c->fetch[i], '*')) {
			room -= fetch_pattern(dir, c->fetch[i], room, out, &count);
		} else {
			room -= fetch_one(dir, c->fetch[i], room, out);
			count++;
		}
	}
	return count;
}
