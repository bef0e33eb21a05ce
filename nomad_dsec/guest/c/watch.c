/* WATCH: inotify on a file, a directory or a tree. Part of workers. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "work.h"

#define WATCHES_MAX 8192
#define DEPTH_MAX 200
#define EVENTS (IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF | IN_ONLYDIR)
#define FILE_EVENTS (IN_MODIFY | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF | IN_DONT_FOLLOW)

static int inotify_fd;
static char *names[WATCHES_MAX + 1]; /* by watch descriptor: path below the top, ends in "/" unless empty */
static bool recursive;
static size_t frame;
static bool frame_open;

static void put_event(const char *kind, const char *prefix, const char *name, bool is_dir, uint32_t cookie)
{
	char full[8192];
	snprintf(full, sizeof full, "%s%s", prefix, name);
	if (!frame_open)
		frame = frame_begin(&work_out, FR_ITEM, 0);
	frame_open = true;
	size_t entry = nest_begin(&work_out, T_ENTRY);
	put_string(&work_out, T_KIND, kind);
	put_string(&work_out, T_NAME, full);
	put_int(&work_out, T_IS_DIR, is_dir);
	put_int(&work_out, T_COOKIE, cookie);
	nest_end(&work_out, entry);
	if (buffer_size(&work_out) > 32u * 1024) {
		frame_end(&work_out, frame);
		frame_open = false;
		work_send_credited();
	}
}

static void flush(void)
{
	if (!frame_open)
		return;
	frame_end(&work_out, frame);
	frame_open = false;
	work_send_credited();
}

/* Watch the directory `fd` (closed at the end) and, when asked for, those below. `fresh`: it appeared while we watch, so
 * what it holds already is told as created. False when there are too many. */
static bool add_dir(int fd, const char *name, bool fresh, int depth)
{
	/* By the current directory and ".": inotify wants a path, and this one cannot be exchanged under us. */
	int wd = fchdir(fd) == 0 ? inotify_add_watch(inotify_fd, ".", EVENTS) : -1;
	DIR *dir = wd >= 0 ? fdopendir(fd) : NULL;
	bool all = wd >= 0 && wd <= WATCHES_MAX;
	if (!all && wd >= 0)
		inotify_rm_watch(inotify_fd, wd);
	if (!dir)
		close(fd);
	if (all) {
		free(names[wd]);
		names[wd] = strdup(name);
	}
	for (struct dirent *d = dir && all && (recursive || fresh) ? readdir(dir) : NULL; d && all; d = readdir(dir)) {
		char below[4096];
		struct stat st;
		if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0 ||
		    fstatat(fd, d->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
			continue;
		if (fresh)
			put_event("created", name, d->d_name, S_ISDIR(st.st_mode), 0);
		if (!recursive || !S_ISDIR(st.st_mode) || depth >= DEPTH_MAX)
			continue;
		int child = openat(fd, d->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (child < 0)
			continue;
		if ((size_t)snprintf(below, sizeof below, "%s%s/", name, d->d_name) < sizeof below)
			all = add_dir(child, below, fresh, depth + 1);
		else
			close(child);
	}
	if (dir)
		closedir(dir);
	return all;
}

static bool is_temp(const char *name) { return strncmp(name, ".dsec-", 6) == 0 && strlen(name) == 26; }

static void added_dir(int top, const char *prefix, const char *name)
{
	char below[4096];
	if ((size_t)snprintf(below, sizeof below, "%s%s/", prefix, name) >= sizeof below)
		return;
	int fd = path_open_below(top, below, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
	if (fd >= 0 && !add_dir(fd, below, true, 0))
		put_event("overflow", "", "", false, 0);
}

static void one_event(int top, const struct inotify_event *e)
{
	const char *name = e->len ? e->name : "", *kind = NULL;
	bool is_dir = (e->mask & IN_ISDIR) != 0;
	if (e->mask & IN_Q_OVERFLOW) {
		put_event("overflow", "", "", false, 0);
		return;
	}
	if (e->wd < 0 || e->wd > WATCHES_MAX || !names[e->wd])
		return;
	if (e->mask & IN_IGNORED) {
		free(names[e->wd]);
		names[e->wd] = NULL;
		return;
	}
	if (e->mask & IN_CREATE)
		kind = "created";
	else if (e->mask & IN_DELETE)
		kind = "removed";
	else if (e->mask & IN_MOVED_FROM)
		kind = "moved_from";
	else if (e->mask & IN_MOVED_TO)
		kind = "moved_to";
	else if (e->mask & IN_MODIFY)
		kind = "modified";
	else if (e->mask & IN_ATTRIB)
		kind = e->len ? "attrib" : NULL; /* of a watched directory: its parent tells */
	else if (e->mask & (IN_DELETE_SELF | IN_MOVE_SELF))
		kind = *names[e->wd] ? NULL : "removed";
	if (!kind || is_temp(name)) /* our own half-written files, where they have a name */
		return;
	put_event(kind, names[e->wd], name, is_dir, e->cookie);
	if (recursive && is_dir && (e->mask & (IN_CREATE | IN_MOVED_TO)))
		added_dir(top, names[e->wd], name);
}

static int add_file(const char *path)
{
	char name[256], copy[4096];
	strcpy(copy, path);
	int parent = path_final(copy) ? path_parent(copy, name, false) : -1;
	if (parent < 0 || fchdir(parent) != 0)
		return -1;
	int wd = inotify_add_watch(inotify_fd, name, FILE_EVENTS);
	if (wd >= 0)
		names[wd] = strdup("");
	close(parent);
	return wd;
}

_Noreturn void file_watch(struct span payload)
{
	static union {
		struct inotify_event first;
		uint8_t bytes[65536];
	} events;
	char path[4096];
	path_field(payload, T_PATH, path);
	recursive = field_int(payload, T_RECURSIVE, 0) != 0;
	inotify_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (inotify_fd < 0)
		work_fail_errno("path", errno);
	int top = path_open(path, O_RDONLY | O_DIRECTORY, 0);
	if (top < 0 && (errno != ENOTDIR || add_file(path) < 0))
		work_fail_errno("path", errno);
	if (top >= 0 && !add_dir(dup(top), "", false, 0))
		work_fail("busy", "path", errno, "more directories than can be watched");
	frame_end(&work_out, frame_begin(&work_out, FR_ITEM, 0));
	work_send_credited();
	for (;;) {
		work_wait(inotify_fd);
		ssize_t n = read(inotify_fd, events.bytes, sizeof events.bytes);
		for (ssize_t at = 0; at < n;) {
			const struct inotify_event *e = (const struct inotify_event *)(const void *)(events.bytes + at);
			one_event(top, e);
			at += (ssize_t)(sizeof *e + e->len);
		}
		flush();
	}
}
