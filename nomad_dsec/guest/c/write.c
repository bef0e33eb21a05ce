/* WRITE and MOVE. Part of workers. */
#include <errno.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "work.h"

#define COPY_DEPTH 100

static char path[4096], name[256], temp[32];
static int parent = -1, target = -1, append_to = -1;
static off_t append_size;
static uint64_t received;

static void drop_temp(void)
{
	if (parent >= 0 && temp[0])
		remove_tree(parent, temp);
}

/* Take back what was appended, unless somebody else has appended too. */
static void cut_append(void)
{
	struct stat st;
	if (append_to >= 0 && fstat(append_to, &st) == 0 && st.st_size == append_size + (off_t)received)
		(void)!ftruncate(append_to, append_size);
}

static void open_in_place(bool append, unsigned mode)
{
	int flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (append ? O_APPEND : 0);
	struct stat st;
	target = openat(parent, name, flags, mode & 0777);
	if (target < 0 || fstat(target, &st) != 0)
		work_fail_errno("path", errno);
	if (!S_ISREG(st.st_mode)) /* it was one when we looked */
		work_fail("not_regular", "path", 0, "not a regular file");
	if (!append && ftruncate(target, 0) != 0)
		work_fail_errno("path", errno);
	if (append) {
		append_to = target;
		append_size = st.st_size;
		work_abandon = cut_append;
	}
}

static void open_temp(void)
{
	/* Without a name, where the file system can: then nothing is left whenever we end, and nobody sees it grow. */
	target = openat(parent, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
	if (target >= 0)
		return;
	temp_name(temp);
	target = openat(parent, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (target < 0)
		work_fail_errno("path", errno);
	work_abandon = drop_temp;
}

static int link_at(const char *as)
{
	char self[64];
	if (linkat(target, "", parent, as, AT_EMPTY_PATH) == 0)
		return 0;
	if (errno != ENOENT && errno != EPERM && errno != EINVAL)
		return -1;
	snprintf(self, sizeof self, "/proc/self/fd/%d", target); /* before Linux 6.10 the other needs a capability */
	return linkat(AT_FDCWD, self, parent, as, AT_SYMLINK_FOLLOW);
}

static void commit(void)
{
	if (!temp[0]) {
		if (link_at(name) == 0)
			return;
		if (errno != EEXIST)
			work_fail_errno("path", errno);
		temp_name(temp);
		if (link_at(temp) != 0)
			work_fail_errno("path", errno);
		work_abandon = drop_temp;
	}
	if (renameat(parent, temp, parent, name) != 0)
		work_fail_errno("path", errno);
	work_abandon = NULL;
}

static void receive_all(uint64_t announced)
{
	for (;;) {
		struct span piece = work_receive();
		if (piece.size == 0)
			break;
		if (write_all(target, piece.at, piece.size) < 0)
			work_fail_errno("path", errno);
		received += piece.size;
		if (announced != UINT64_MAX && received > announced)
			break;
	}
	if (announced != UINT64_MAX && received != announced)
		work_fail("length_mismatch", "size", 0, "more or fewer bytes came than were announced");
}

_Noreturn void file_write(struct span payload)
{
	struct stat old = {0};
	path_field(payload, T_PATH, path);
	bool append = field_int(payload, T_APPEND, 0) != 0, atomic = field_int(payload, T_ATOMIC, 1) != 0;
	uint64_t mode = field_int(payload, T_MODE, UINT64_MAX);
	if (mode != UINT64_MAX && mode > 07777)
		work_fail("bad_field", "mode", 0, "at most 07777");
	if (path[strlen(path) - 1] == '/' || !path_final(path))
		work_fail_errno("path", path[strlen(path) - 1] == '/' ? EISDIR : errno);
	parent = path_parent(path, name, field_int(payload, T_PARENTS, 0) != 0);
	if (parent < 0)
		work_fail_errno("path", errno == EINVAL ? EISDIR : errno);
	bool exists = fstatat(parent, name, &old, AT_SYMLINK_NOFOLLOW) == 0;
	if (exists && S_ISDIR(old.st_mode))
		work_fail_errno("path", EISDIR);
	if (exists && !S_ISREG(old.st_mode))
		work_fail("not_regular", "path", 0, "something that is not a regular file has that name");
	unsigned final_mode = mode != UINT64_MAX ? (unsigned)mode : exists ? old.st_mode & 07777 : 0644;
	if (append || !atomic)
		open_in_place(append, final_mode);
	else
		open_temp();
	receive_all(field_int(payload, T_SIZE, UINT64_MAX));
	if (!append && atomic && exists && fchown(target, old.st_uid, old.st_gid) != 0)
		errno = 0; /* it becomes ours, as with every editor */
	if ((mode != UINT64_MAX || (!append && atomic)) && fchmod(target, final_mode) != 0)
		work_fail_errno("mode", errno);
	if (!append && atomic)
		commit();
	size_t frame = frame_begin(&work_out, FR_OK, 0);
	put_int(&work_out, T_SIZE, received);
	frame_end(&work_out, frame);
	work_send();
	work_done();
}

static void keep_facts(int dir, const char *entry, const struct stat *st)
{
	struct timespec times[2] = {st->st_atim, st->st_mtim};
	if (fchownat(dir, entry, st->st_uid, st->st_gid, AT_SYMLINK_NOFOLLOW) != 0)
		errno = 0; /* not root: it becomes ours */
	if (!S_ISLNK(st->st_mode) && fchmodat(dir, entry, st->st_mode & 07777, 0) != 0)
		errno = 0;
	utimensat(dir, entry, times, AT_SYMLINK_NOFOLLOW);
}

static int copy_file(int from, int to)
{
	static uint8_t piece[MAX_DATA];
	for (;;) {
		ssize_t n = copy_file_range(from, NULL, to, NULL, 1 << 30, 0);
		if (n == 0)
			break; /* the end, or a file system that gives nothing this way: reading tells */
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			break;
	}
	for (;;) {
		ssize_t n = read(from, piece, sizeof piece);
		if (n == 0)
			return 0;
		if (n < 0 || write_all(to, piece, (size_t)n) < 0)
			return -1;
	}
}

static int copy_entry(int from, const char *entry, int to, const char *as, int depth);

static int copy_dir(int from, int to, int depth)
{
	DIR *dir = fdopendir(from);
	int result = dir ? 0 : -1;
	for (struct dirent *d = dir ? readdir(dir) : NULL; d && result == 0; d = readdir(dir))
		if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0)
			result = copy_entry(from, d->d_name, to, d->d_name, depth + 1);
	int error = errno;
	if (dir)
		closedir(dir);
	errno = error;
	return result;
}

static int copy_entry(int from, const char *entry, int to, const char *as, int depth)
{
	struct stat st;
	char link[4096];
	int result = -1, source = -1, made = -1;
	if (fstatat(from, entry, &st, AT_SYMLINK_NOFOLLOW) != 0)
		return -1;
	if (S_ISLNK(st.st_mode)) {
		ssize_t n = readlinkat(from, entry, link, sizeof link - 1);
		link[n > 0 ? n : 0] = 0;
		result = n > 0 ? symlinkat(link, to, as) : -1;
	} else if (S_ISFIFO(st.st_mode)) {
		result = mkfifoat(to, as, 0600);
	} else if (S_ISREG(st.st_mode)) {
		source = openat(from, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
		made = source >= 0 ? openat(to, as, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;
		result = made >= 0 ? copy_file(source, made) : -1;
	} else if (S_ISDIR(st.st_mode) && depth < COPY_DEPTH) {
		source = openat(from, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		made = source >= 0 && mkdirat(to, as, 0700) == 0 ? openat(to, as, O_RDONLY | O_DIRECTORY | O_NOFOLLOW) : -1;
		result = made >= 0 ? copy_dir(source, made, depth) : -1;
		source = made >= 0 ? -1 : source; /* closed by copy_dir */
	} else {
		errno = S_ISDIR(st.st_mode) ? ELOOP : ENXIO;
	}
	int error = errno;
	if (source >= 0)
		close(source);
	if (made >= 0)
		close(made);
	if (result == 0)
		keep_facts(to, as, &st);
	errno = error;
	return result;
}

_Noreturn void file_move(struct span payload)
{
	char to[4096], to_name[256];
	unsigned flags = field_int(payload, T_REPLACE, 1) ? 0 : 1 /* RENAME_NOREPLACE */;
	path_field(payload, T_PATH, path);
	path_field(payload, T_TARGET, to);
	int from = path_parent(path, name, false);
	if (from < 0)
		work_fail_errno("path", errno);
	parent = path_parent(to, to_name, false);
	if (parent < 0)
		work_fail_errno("target", errno);
	if (syscall(SYS_renameat2, from, name, parent, to_name, flags) == 0)
		work_ok();
	if (errno != EXDEV)
		work_fail_errno("path", errno);
	/* Another file system, or a directory of the image's lower layer: a copy under another name, then the exchange. */
	temp_name(temp);
	work_abandon = drop_temp;
	if (copy_entry(from, name, parent, temp, 0) != 0)
		work_fail_errno("path", errno);
	if (syscall(SYS_renameat2, parent, temp, parent, to_name, flags) != 0)
		work_fail_errno("target", errno);
	work_abandon = NULL;
	if (remove_tree(from, name) != 0)
		work_fail_errno("path", errno);
	work_ok();
}
