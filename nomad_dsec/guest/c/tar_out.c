/* DOWNLOAD: a tree as a pax tar stream. Part of workers. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tar.h"
#include "work.h"

#define DEPTH_MAX 200
#define LINK_SLOTS 32768u
#define SPARSE_LEAST (256u * 1024) /* holes below that are not worth a map */

struct seen {
	dev_t device;
	ino_t inode;
	char *name;
};

static struct member m;
static uint8_t out[MAX_DATA], header[NAME_ROOM * 3];
static size_t out_size;
static uint64_t files, total;
static struct seen *links; /* of files with several names; when full, the rest are sent once per name */
static size_t link_count;
static struct piece *map;
static char *map_text;

static void emit(const uint8_t *bytes, size_t n)
{
	while (n) {
		size_t piece = sizeof out - out_size < n ? sizeof out - out_size : n;
		memcpy(out + out_size, bytes, piece);
		out_size += piece;
		bytes += piece;
		n -= piece;
		if (out_size == sizeof out) {
			work_data(out, out_size);
			out_size = 0;
		}
	}
}

static void emit_zeros(uint64_t n)
{
	static const uint8_t zeros[BLOCK];
	for (; n; n -= n < BLOCK ? n : BLOCK)
		emit(zeros, n < BLOCK ? (size_t)n : BLOCK);
}

static void skip(const char *reason)
{
	size_t frame = frame_begin(&work_out, FR_ITEM, 0);
	put_string(&work_out, T_NAME, m.name);
	put_string(&work_out, T_REASON, reason);
	frame_end(&work_out, frame);
	work_send_credited();
}

/* The name under which this file was sent already; else NULL, and it is noted. */
static const char *seen_as(const struct stat *st)
{
	if (!links)
		links = calloc(LINK_SLOTS, sizeof *links);
	if (!links)
		return NULL;
	size_t at = (size_t)(st->st_ino * 2654435761u ^ st->st_dev) % LINK_SLOTS;
	for (; links[at].name; at = (at + 1) % LINK_SLOTS)
		if (links[at].device == st->st_dev && links[at].inode == st->st_ino)
			return links[at].name;
	if (link_count < LINK_SLOTS / 2 && (links[at].name = strdup(m.name))) {
		links[at].device = st->st_dev;
		links[at].inode = st->st_ino;
		link_count++;
	}
	return NULL;
}

/* False when fewer than n bytes were there: zeros took their place. */
static bool emit_range(int fd, uint64_t offset, uint64_t n)
{
	static uint8_t piece[MAX_DATA];
	while (n) {
		ssize_t got = pread(fd, piece, n < sizeof piece ? (size_t)n : sizeof piece, (off_t)offset);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0) {
			emit_zeros(n);
			return false;
		}
		emit(piece, (size_t)got);
		offset += (uint64_t)got;
		n -= (uint64_t)got;
	}
	return true;
}

/* The pieces with data; 0 when it is not worth it or can't be told, and then it is sent whole. */
static size_t sparse_map(int fd, const struct stat *st)
{
	size_t count = 0;
	if (st->st_size < (off_t)SPARSE_LEAST || (uint64_t)st->st_blocks * 512 + SPARSE_LEAST > (uint64_t)st->st_size)
		return 0;
	if (!map)
		map = calloc(SPARSE_MAX, sizeof *map);
	if (!map_text)
		map_text = malloc(SPARSE_MAX * 44 + 64);
	if (!map || !map_text)
		return 0;
	for (off_t at = 0; at < st->st_size && count < SPARSE_MAX;) {
		off_t data = lseek(fd, at, SEEK_DATA);
		if (data < 0 && errno == ENXIO)
			break;
		off_t hole = data < 0 ? -1 : lseek(fd, data, SEEK_HOLE);
		if (hole < 0)
			return 0;
		if (hole > st->st_size)
			hole = st->st_size;
		map[count++] = (struct piece){(uint64_t)data, (uint64_t)(hole - data)};
		at = hole;
	}
	if (count == SPARSE_MAX)
		return 0;
	if (count == 0 || map[count - 1].offset + map[count - 1].size < (uint64_t)st->st_size)
		map[count++] = (struct piece){(uint64_t)st->st_size, 0}; /* says how long the file is */
	return count;
}

static bool emit_content(int fd, const struct stat *st)
{
	size_t pieces = sparse_map(fd, st), text = 0;
	bool whole = true;
	m.size = (uint64_t)st->st_size;
	if (pieces) {
		text = (size_t)sprintf(map_text, "%zu\n", pieces);
		m.size = 0;
		for (size_t i = 0; i < pieces; i++) {
			text += (size_t)sprintf(map_text + text, "%llu\n%llu\n", (unsigned long long)map[i].offset,
			                        (unsigned long long)map[i].size);
			m.size += map[i].size;
		}
		m.sparse = true;
		m.real_size = (uint64_t)st->st_size;
		m.size += (text + BLOCK - 1) / BLOCK * BLOCK;
	}
	emit(header, tar_header(header, &m));
	if (!pieces)
		whole = emit_range(fd, 0, m.size);
	if (pieces) {
		emit((uint8_t *)map_text, text);
		emit_zeros((BLOCK - text % BLOCK) % BLOCK);
		for (size_t i = 0; i < pieces; i++)
			whole = emit_range(fd, map[i].offset, map[i].size) && whole;
	}
	emit_zeros((BLOCK - m.size % BLOCK) % BLOCK);
	m.sparse = false;
	total += (uint64_t)st->st_size;
	return whole;
}

static void facts(const struct stat *st, char type)
{
	m.mode = st->st_mode & 07777;
	m.uid = st->st_uid;
	m.gid = st->st_gid;
	m.mtime = st->st_mtim.tv_sec;
	m.type = type;
	m.size = 0;
	m.link[0] = 0;
}

static void emit_file(int dir, const char *entry)
{
	struct stat st;
	int fd = openat(dir, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
		skip(fd < 0 && errno != ELOOP && errno != ENXIO && errno != ENOENT ? "unreadable" : "changed");
		if (fd >= 0)
			close(fd);
		return;
	}
	const char *first = st.st_nlink > 1 ? seen_as(&st) : NULL;
	facts(&st, first ? '1' : '0');
	if (first) {
		snprintf(m.link, sizeof m.link, "%s", first);
		emit(header, tar_header(header, &m));
	} else if (!emit_content(fd, &st)) {
		skip("changed"); /* it shrank while it was read, or could not be read to its end */
	}
	files++;
	close(fd);
}

static void emit_dir(int dir, int depth);

static void emit_entry(int dir, const char *entry, int depth)
{
	struct stat st;
	size_t before = strlen(m.name);
	if (before + strlen(entry) + 3 > sizeof m.name)
		return;
	strcpy(m.name + before, entry);
	if (fstatat(dir, entry, &st, AT_SYMLINK_NOFOLLOW) != 0) {
		m.name[before] = 0;
		return; /* gone meanwhile */
	}
	if (S_ISREG(st.st_mode)) {
		emit_file(dir, entry);
	} else if (S_ISLNK(st.st_mode)) {
		facts(&st, '2');
		ssize_t n = readlinkat(dir, entry, m.link, 4096);
		m.link[n > 0 ? n : 0] = 0;
		emit(header, tar_header(header, &m));
		files++;
	} else if (S_ISDIR(st.st_mode)) {
		int child = depth < DEPTH_MAX ? openat(dir, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
		if (child < 0) {
			skip(depth < DEPTH_MAX ? "unreadable" : "too_deep");
		} else {
			strcat(m.name, "/");
			facts(&st, '5');
			emit(header, tar_header(header, &m));
			files++;
			emit_dir(child, depth + 1);
		}
	} else {
		skip(S_ISFIFO(st.st_mode) ? "fifo" : S_ISSOCK(st.st_mode) ? "socket" : "device");
	}
	m.name[before] = 0;
}

/* Closes the descriptor. */
static void emit_dir(int fd, int depth)
{
	DIR *dir = fdopendir(fd);
	if (!dir) {
		close(fd);
		return;
	}
	for (struct dirent *d = readdir(dir); d; d = readdir(dir))
		if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0)
			emit_entry(fd, d->d_name, depth);
	closedir(dir);
}

_Noreturn void tree_download(struct span payload)
{
	char path[4096], name[256];
	path_field(payload, T_PATH, path);
	int fd = path_open(path, O_RDONLY | O_DIRECTORY, 0);
	if (fd >= 0) {
		emit_dir(fd, 0);
	} else if (errno == ENOTDIR) {
		if (!path_final(path) || (fd = path_parent(path, name, false)) < 0)
			work_fail_errno("path", errno);
		emit_entry(fd, name, 0);
	} else {
		work_fail_errno("path", errno);
	}
	emit_zeros((uint64_t)2 * BLOCK);
	work_data(out, out_size);
	size_t frame = frame_begin(&work_out, FR_OK, 0);
	put_int(&work_out, T_FILES, files);
	put_int(&work_out, T_SIZE, total);
	frame_end(&work_out, frame);
	work_send();
	work_done();
}
