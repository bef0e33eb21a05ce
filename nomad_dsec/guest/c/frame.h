/* Codec: growing byte buffers, frame headers, tag-length-value fields. No I/O, no global state; fuzzed. */
#ifndef DSEC_FRAME_H
#define DSEC_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire.h"

/* Bytes [start, end) of data are live. Memory failure sets `failed` and drops the append: the owner closes. */
struct buffer {
	uint8_t *data;
	size_t start, end, capacity;
	bool failed;
};

static inline size_t buffer_size(const struct buffer *b) { return b->end - b->start; }
/* Room for n more bytes at data + end; NULL when memory is out. */
uint8_t *buffer_reserve(struct buffer *b, size_t n);
void buffer_append(struct buffer *b, const void *bytes, size_t n);
void buffer_consume(struct buffer *b, size_t n);
void buffer_free(struct buffer *b);

struct span {
	const uint8_t *at;
	size_t size;
};

struct header {
	uint32_t length;
	uint8_t type;
	uint32_t stream;
};

enum parse { PARSE_OK, PARSE_MORE, PARSE_BAD };
/* Header at the front of [at, at + size); BAD when it can't be one: framing is lost. */
enum parse header_parse(const uint8_t *at, size_t size, struct header *out);
void header_write(uint8_t at[HEADER_SIZE], uint32_t length, uint8_t type, uint32_t stream);

struct field {
	uint16_t tag;
	struct span value;
};

/* Walks fields: PARSE_OK fills `out` and moves `rest`; PARSE_MORE at the end; PARSE_BAD on a broken list. */
enum parse field_next(struct span *rest, struct field *out);
/* Checks a whole list, nested ones too: every tag known (or ignorable), every integer 8 bytes. On failure returns
 * false and the name of the field at fault ("" when the list itself is broken). */
bool fields_check(struct span payload, const char **field);
const char *field_name(uint16_t tag); /* lower case; "" when unknown */
bool field_find(struct span payload, uint16_t tag, struct span *out);
uint64_t field_int(struct span payload, uint16_t tag, uint64_t otherwise);
uint64_t load_u64(const uint8_t *at);
uint32_t load_u32(const uint8_t *at);
void store_u64(uint8_t *at, uint64_t value);
void store_u32(uint8_t *at, uint32_t value);

/* Writing: begin() returns the frame's position for end(), which fills in the length. */
size_t frame_begin(struct buffer *b, uint8_t type, uint32_t stream);
void frame_end(struct buffer *b, size_t position);
void put_int(struct buffer *b, uint16_t tag, uint64_t value);
void put_bytes(struct buffer *b, uint16_t tag, const void *bytes, size_t n);
void put_string(struct buffer *b, uint16_t tag, const char *text);
size_t nest_begin(struct buffer *b, uint16_t tag);
void nest_end(struct buffer *b, size_t position);
void put_error(struct buffer *b, uint32_t stream, const char *code, const char *field, int error, const char *message);

#endif
