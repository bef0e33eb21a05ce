/* UPLOAD: a tar stream into a tree. Members stay below the target: the kernel refuses to resolve their parents out of it
 * (RESOLVE_BENEATH), and last names are never followed. Part of workers. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tar.h"
#include "work.h"

static struct member m;
static struct span rest; /* of the DATA received last */
static bool at_end;
static uint64_t files, total;
static int top;
static bool keep_owner;
static char cached[NAME_ROOM]; /* parent of the last member, and its descriptor */
static int cached_fd = -1;

static size_t take(const uint8_t **bytes, uint64_t max)
{
	if (rest.size == 0 && !at_end)
		rest = work_receive();
	if (rest.size == 0)
		at_end = true;
	size_t n = rest.size < max ? rest.size : (size_t)max;
	*bytes = rest.at;
	rest.at += n;
	rest.size -= n;
	return n;
}

static bool take_exactly(void *context, uint8_t *to, size_t n)
{
	(void)context;
	while (n) {
		const uint8_t *bytes;
		size_t got = take(&bytes, n);
		if (got == 0)
			return false;
		memcpy(to, bytes, got);
		to += got;
		n -= got;
	}
	return true;
}

static _Noreturn void bad(const char *code, const char *why)
{
	char message[512];
	size_t n = strnlen(why, 200);
	memcpy(message, why, n);
	memcpy(message + n, ", at member ", 12);
	n += 12;
	for (const char *at = m.name; *at && n < sizeof message - 1; at++)
		message[n++] = *at >= ' ' && *at < 127 ? *at : '?';
	message[n] = 0;
	work_fail(code, "data", 0, message);
}

static _Noreturn void bad_errno(int error)
{
	bad(error == EXDEV || error == ELOOP ? "unsafe_path" : error_code(error), strerror(error));
}

static void skip_bytes(uint64_t n)
{
	const uint8_t *bytes;
	for (size_t got; n; n -= got)
		if ((got = take(&bytes, n)) == 0)
			bad("bad_archive", "it ends in the middle of a member");
}

/* The name without leading "/" and "./", and without trailing "/"; "" is the target itself. */
static char *clean(char *name)
{
	for (;;) {
		if (name[0] == '/')
			name++;
		else if (name[0] == '.' && (name[1] == '/' || name[1] == 0))
			name++;
		else
			break;
	}
	size_t n = strlen(name);
	while (n && name[n - 1] == '/')
		name[--n] = 0;
	for (const char *at = name; at; at = strchr(at, '/') ? strchr(at, '/') + 1 : NULL)
		if (strncmp(at, "..", 2) == 0 && (at[2] == '/' || at[2] == 0))
			bad("unsafe_path", "a name that leads upwards");
	if (n > 4095)
		bad("name_too_long", "a name of more than 4095 bytes");
	return name;
}

static int make_below(char *path)
{
	int fd = dup(top);
	for (char *at = path; fd >= 0 && *at;) {
		char *end = at + strcspn(at, "/"), kept = *end;
		*end = 0;
		int next = path_open_below(top, path, O_PATH | O_DIRECTORY, 0);
		if (next < 0 && errno == ENOENT && (mkdirat(fd, at, 0755) == 0 || errno == EEXIST))
			next = path_open_below(top, path, O_PATH | O_DIRECTORY, 0);
		int error = errno;
		close(fd);
		errno = error;
		fd = next;
		*end = kept;
		at = end + strspn(end, "/");
	}
	return fd;
}

/* Directory that holds the last name of `name`; *last points to that. */
static int parent_of(char *name, const char **last)
{
	char *slash = strrchr(name, '/');
	*last = slash ? slash + 1 : name;
	if (!slash)
		return top;
	*slash = 0;
	if (cached_fd < 0 || strcmp(cached, name) != 0) {
		if (cached_fd >= 0)
			close(cached_fd);
		cached_fd = make_below(name);
		if (cached_fd < 0)
			bad_errno(errno);
		strcpy(cached, name);
	}
	*slash = '/';
	return cached_fd;
}

/* What is there under the name makes room. The cached parent may be below it, so it is forgotten. */
static void clear(int dir, const char *last)
{
	if (unlinkat(dir, last, 0) != 0 && errno != ENOENT)
		bad_errno(errno);
	cached[0] = 0;
}

static void put_facts(int dir, const char *last)
{
	struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = m.mtime}};
	if (keep_owner && fchownat(dir, last, (uid_t)m.uid, (gid_t)m.gid, AT_SYMLINK_NOFOLLOW) != 0)
		bad_errno(errno);
	if (m.type != '2' && fchmodat(dir, last, (mode_t)m.mode, 0) != 0)
		bad_errno(errno);
	utimensat(dir, last, times, AT_SYMLINK_NOFOLLOW);
}

static void write_content(int fd, uint64_t n)
{
	const uint8_t *bytes;
	for (size_t got; n; n -= got) {
		if ((got = take(&bytes, n)) == 0)
			bad("bad_archive", "it ends in the middle of a member");
		if (write_all(fd, bytes, got) < 0)
			bad_errno(errno);
	}
}

/* One decimal line of a sparse map; counts what it takes. */
static uint64_t map_number(uint64_t *left)
{
	uint64_t value = 0;
	uint8_t c;
	for (int digits = 0; digits < 21; digits++) {
		if (*left == 0 || !take_exactly(NULL, &c, 1))
			break;
		(*left)--;
		if (c == '\n' && digits)
			return value;
		if (c < '0' || c > '9' || value > INT64_MAX / 10 - 9)
			break;
		value = value * 10 + (unsigned)(c - '0');
	}
	bad("bad_archive", "a sparse map is malformed");
}

static void write_sparse(int fd)
{
	static struct piece map[SPARSE_MAX];
	uint64_t left = m.size, count = map_number(&left);
	if (count > SPARSE_MAX)
		bad("bad_archive", "a sparse map has too many pieces");
	for (uint64_t i = 0; i < count; i++) {
		map[i].offset = map_number(&left);
		map[i].size = map_number(&left);
	}
	uint64_t padding = (BLOCK - (m.size - left) % BLOCK) % BLOCK;
	if (padding > left)
		bad("bad_archive", "a sparse map is malformed");
	skip_bytes(padding);
	left -= padding;
	for (uint64_t i = 0; i < count; i++) {
		if (map[i].size > left || map[i].offset > m.real_size || map[i].size > m.real_size - map[i].offset)
			bad("bad_archive", "a sparse map is malformed");
		if (lseek(fd, (off_t)map[i].offset, SEEK_SET) < 0)
			bad_errno(errno);
		write_content(fd, map[i].size);
		left -= map[i].size;
	}
	skip_bytes(left);
	if (m.real_size > INT64_MAX || ftruncate(fd, (off_t)m.real_size) != 0)
		bad_errno(errno);
}

static void put_file(int dir, const char *last)
{
	int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	int fd = openat(dir, last, flags, 0600);
	if (fd < 0 && errno == EEXIST) {
		clear(dir, last);
		fd = openat(dir, last, flags, 0600);
	}
	if (fd < 0)
		bad_errno(errno);
	if (m.sparse)
		write_sparse(fd);
	else
		write_content(fd, m.size);
	struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = m.mtime}};
	if ((keep_owner && fchown(fd, (uid_t)m.uid, (gid_t)m.gid) != 0) || fchmod(fd, (mode_t)m.mode) != 0)
		bad_errno(errno);
	futimens(fd, times);
	close(fd);
	total += m.real_size;
}

static void put_dir(int dir, const char *last)
{
	struct stat st;
	if (*last == 0)
		return; /* the target itself */
	if (mkdirat(dir, last, 0755) != 0) {
		if (errno != EEXIST || fstatat(dir, last, &st, AT_SYMLINK_NOFOLLOW) != 0)
			bad_errno(errno);
		int fd = S_ISLNK(st.st_mode) ? path_open_below(dir, last, O_PATH | O_DIRECTORY, 0) : -1;
		if (fd >= 0) { /* a link to a directory below the target stands for it */
			close(fd);
			return;
		}
		if (!S_ISDIR(st.st_mode)) {
			clear(dir, last);
			if (mkdirat(dir, last, 0755) != 0)
				bad_errno(errno);
		}
	}
	if (geteuid() != 0)
		m.mode |= 0700; /* what comes into it must still be writable */
	put_facts(dir, last);
}

static void put_link(int dir, const char *last)
{
	const char *target_last;
	char *target = clean(m.link), *slash = strrchr(target, '/');
	target_last = slash ? slash + 1 : target;
	if (slash)
		*slash = 0;
	int from = slash ? path_open_below(top, target, O_PATH | O_DIRECTORY, 0) : dup(top);
	if (from < 0)
		bad_errno(errno);
	int result = linkat(from, target_last, dir, last, 0);
	if (result != 0 && errno == EEXIST) {
		struct stat a, b;
		if (fstatat(from, target_last, &a, AT_SYMLINK_NOFOLLOW) == 0 &&
		    fstatat(dir, last, &b, AT_SYMLINK_NOFOLLOW) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev) {
			result = 0; /* a link to itself */
		} else {
			clear(dir, last);
			result = linkat(from, target_last, dir, last, 0);
		}
	}
	if (result != 0)
		bad_errno(errno);
	close(from);
}

static void put_symlink(int dir, const char *last)
{
	if (symlinkat(m.link, dir, last) != 0) {
		if (errno != EEXIST)
			bad_errno(errno);
		clear(dir, last);
		if (symlinkat(m.link, dir, last) != 0)
			bad_errno(errno);
	}
	put_facts(dir, last);
}

static void skip(const char *reason)
{
	size_t frame = frame_begin(&work_out, FR_ITEM, 0);
	put_bytes(&work_out, T_NAME, m.name, strnlen(m.name, 4096));
	put_string(&work_out, T_REASON, reason);
	frame_end(&work_out, frame);
	work_send(); /* without credit: waiting for that would swallow DATA */
}

static void put_member(void)
{
	const char *last;
	char *name = clean(m.name);
	if (m.type == '3' || m.type == '4' || m.type == '6') {
		skip(m.type == '6' ? "fifo" : "device");
		return;
	}
	if (*name == 0 && m.type != '5')
		bad("bad_archive", "a member without a name");
	int dir = parent_of(name, &last);
	if (m.type == '5')
		put_dir(dir, last);
	else if (m.type == '1')
		put_link(dir, last);
	else if (m.type == '2')
		put_symlink(dir, last);
	else if (m.type == '0' || m.type == '7')
		put_file(dir, last);
	else
		bad("bad_archive", "a member of a type we do not know");
	files++;
}

_Noreturn void tree_upload(struct span payload)
{
	char path[4096];
	const char *why = "";
	const uint8_t *ignored;
	enum tar_result result;
	path_field(payload, T_PATH, path);
	keep_owner = field_int(payload, T_KEEP_OWNER, 0) != 0;
	top = path_dirs(path);
	if (top < 0)
		work_fail_errno("path", errno);
	while ((result = tar_next(take_exactly, NULL, &m, &why)) == TAR_MEMBER) {
		uint64_t stored = m.size;
		char type = m.type;
		put_member();
		if (type != '0' && type != '7')
			skip_bytes(stored);
		skip_bytes((BLOCK - stored % BLOCK) % BLOCK);
	}
	if (result == TAR_BAD)
		bad("bad_archive", why);
	while (take(&ignored, UINT64_MAX)) /* padding after the end mark */
		;
	size_t frame = frame_begin(&work_out, FR_OK, 0);
	put_int(&work_out, T_FILES, files);
	put_int(&work_out, T_SIZE, total);
	frame_end(&work_out, frame);
	work_send();
	work_done();
}
