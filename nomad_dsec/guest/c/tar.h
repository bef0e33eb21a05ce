/* The block of a tar archive (POSIX ustar and pax), as both directions see it. */
#ifndef DSEC_TAR_H
#define DSEC_TAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BLOCK 512u
#define PAX_MAX (1024u * 1024)
#define NAME_ROOM 65536u
#define SPARSE_MAX 16384u /* pieces of one sparse file */

struct block {
	char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100], magic[6], version[2],
	    user[32], group[32], major[8], minor[8], prefix[155], pad[12];
};
_Static_assert(sizeof(struct block) == BLOCK, "a block is 512 bytes");

struct piece {
	uint64_t offset, size;
};

/* One member; strings are valid until the next one. */
struct member {
	char name[NAME_ROOM], link[NAME_ROOM];
	uint64_t size, mode, uid, gid;
	int64_t mtime;
	char type;
	bool sparse;	    /* content begins with a map (GNU.sparse 1.0), real_size is that of the file */
	uint64_t real_size;
};

enum tar_result { TAR_MEMBER, TAR_END, TAR_BAD };

/* Reads exactly n bytes, or returns false at the end of the stream. */
typedef bool tar_read(void *context, uint8_t *to, size_t n);
/* The header of the next member, extensions folded in; content of member->size bytes and padding follow.
 * TAR_BAD: *why says what is wrong. */
enum tar_result tar_next(tar_read *read, void *context, struct member *member, const char **why);

/* Header blocks of one member into `to` (room for NAME_ROOM * 2 + 4096); returns their size. Name and link may be long.
 * type '0' with sparse: size is what is stored, map included. */
size_t tar_header(uint8_t *to, const struct member *member);

#endif
