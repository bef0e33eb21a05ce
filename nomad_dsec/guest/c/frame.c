#include "frame.h"

#include <stdlib.h>
#include <string.h>

uint64_t load_u64(const uint8_t *at)
{
	uint64_t value;
	memcpy(&value, at, sizeof value); /* this program is little-endian only, see the assert below */
	return value;
}

uint32_t load_u32(const uint8_t *at)
{
	uint32_t value;
	memcpy(&value, at, sizeof value);
	return value;
}

static uint16_t load_u16(const uint8_t *at)
{
	uint16_t value;
	memcpy(&value, at, sizeof value);
	return value;
}

void store_u64(uint8_t *at, uint64_t value) { memcpy(at, &value, sizeof value); }
void store_u32(uint8_t *at, uint32_t value) { memcpy(at, &value, sizeof value); }
static void store_u16(uint8_t *at, uint16_t value) { memcpy(at, &value, sizeof value); }

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

uint8_t *buffer_reserve(struct buffer *b, size_t n)
{
	if (b->failed)
		return NULL;
	if (b->start == b->end)
		b->start = b->end = 0;
	if (b->capacity - b->end >= n)
		return b->data + b->end;
	if (b->start >= n && b->start >= b->capacity / 2) {
		memmove(b->data, b->data + b->start, b->end - b->start);
		b->end -= b->start;
		b->start = 0;
		return b->data + b->end;
	}
	size_t want = b->capacity ? b->capacity : 512;
	while (want - b->end < n)
		want *= 2;
	uint8_t *data = realloc(b->data, want);
	if (!data) {
		b->failed = true;
		return NULL;
	}
	b->data = data;
	b->capacity = want;
	return data + b->end;
}

void buffer_append(struct buffer *b, const void *bytes, size_t n)
{
	if (n == 0)
		return;
	uint8_t *at = buffer_reserve(b, n);
	if (!at)
		return;
	memcpy(at, bytes, n);
	b->end += n;
}

void buffer_consume(struct buffer *b, size_t n)
{
	b->start += n;
	if (b->start != b->end)
		return;
	b->start = b->end = 0;
	if (b->capacity > 64 * 1024) /* a burst must not stay resident in an idle sandbox */
		buffer_free(b);
}

void buffer_free(struct buffer *b)
{
	free(b->data);
	*b = (struct buffer){.failed = b->failed};
}

enum parse header_parse(const uint8_t *at, size_t size, struct header *out)
{
	if (size < HEADER_SIZE)
		return PARSE_MORE;
	out->length = load_u32(at);
	out->type = at[4];
	out->stream = load_u32(at + 8);
	if (at[5] || at[6] || at[7])
		return PARSE_BAD;
	uint32_t bound = MAX_SMALL;
	if (out->type == FR_EXEC)
		bound = MAX_PAYLOAD;
	else if (out->type == FR_DATA)
		bound = MAX_DATA;
	return out->length <= bound ? PARSE_OK : PARSE_BAD;
}

void header_write(uint8_t at[HEADER_SIZE], uint32_t length, uint8_t type, uint32_t stream)
{
	store_u32(at, length);
	store_u32(at + 4, type);
	store_u32(at + 8, stream);
}

enum parse field_next(struct span *rest, struct field *out)
{
	if (rest->size == 0)
		return PARSE_MORE;
	if (rest->size < 6)
		return PARSE_BAD;
	uint32_t length = load_u32(rest->at + 2);
	if (length > rest->size - 6)
		return PARSE_BAD;
	out->tag = load_u16(rest->at);
	out->value = (struct span){rest->at + 6, length};
	rest->at += 6 + (size_t)length;
	rest->size -= 6 + (size_t)length;
	return PARSE_OK;
}

static char field_kind(uint16_t tag)
{
	switch (tag) {
#define X(name, number, kind)                                                                                         \
	case number:                                                                                                      \
		return #kind[0];
		FIELDS(X)
#undef X
	default:
		return 0;
	}
}

const char *field_name(uint16_t tag)
{
	static char lower[32];
	const char *upper = "";
	switch (tag) {
#define X(name, number, kind)                                                                                         \
	case number:                                                                                                      \
		upper = #name;                                                                                                \
		break;
		FIELDS(X)
#undef X
	default:
		break;
	}
	size_t i = 0;
	for (; upper[i] && i + 1 < sizeof lower; i++)
		lower[i] = (char)(upper[i] >= 'A' && upper[i] <= 'Z' ? upper[i] + 32 : upper[i]);
	lower[i] = 0;
	return lower;
}

bool fields_check(struct span payload, const char **field)
{
	struct field f;
	enum parse result;
	while ((result = field_next(&payload, &f)) == PARSE_OK) {
		char kind = field_kind(f.tag);
		if (!kind && (f.tag & 0x8000))
			continue;
		struct span rest = f.value;
		struct field inner;
		bool good = kind == 'B' || (kind == 'I' && f.value.size == 8);
		if (kind == 'N') { /* nested lists hold no lists: depth is bounded */
			while ((result = field_next(&rest, &inner)) == PARSE_OK) {
				char k = field_kind(inner.tag);
				bool known = k == 'B' || (k == 'I' && inner.value.size == 8) || (!k && (inner.tag & 0x8000));
				if (!known) {
					*field = field_name(inner.tag);
					return false;
				}
			}
			good = result == PARSE_MORE;
		}
		if (!good) {
			*field = field_name(f.tag);
			return false;
		}
	}
	*field = "";
	return result == PARSE_MORE;
}

bool field_find(struct span payload, uint16_t tag, struct span *out)
{
	struct field f;
	while (field_next(&payload, &f) == PARSE_OK)
		if (f.tag == tag) {
			*out = f.value;
			return true;
		}
	return false;
}

uint64_t field_int(struct span payload, uint16_t tag, uint64_t otherwise)
{
	struct span value;
	return field_find(payload, tag, &value) && value.size == 8 ? load_u64(value.at) : otherwise;
}

size_t frame_begin(struct buffer *b, uint8_t type, uint32_t stream)
{
	uint8_t *at = buffer_reserve(b, HEADER_SIZE);
	if (!at)
		return 0;
	header_write(at, 0, type, stream);
	b->end += HEADER_SIZE;
	return b->end - b->start; /* relative: appends may move the live bytes */
}

void frame_end(struct buffer *b, size_t position)
{
	if (b->failed)
		return;
	uint8_t *payload = b->data + b->start + position;
	store_u32(payload - HEADER_SIZE, (uint32_t)(b->data + b->end - payload));
}

void put_bytes(struct buffer *b, uint16_t tag, const void *bytes, size_t n)
{
	uint8_t *at = buffer_reserve(b, 6 + n);
	if (!at)
		return;
	store_u16(at, tag);
	store_u32(at + 2, (uint32_t)n);
	if (n)
		memcpy(at + 6, bytes, n);
	b->end += 6 + n;
}

void put_int(struct buffer *b, uint16_t tag, uint64_t value) { put_bytes(b, tag, &value, sizeof value); }

void put_string(struct buffer *b, uint16_t tag, const char *text) { put_bytes(b, tag, text, strlen(text)); }

size_t nest_begin(struct buffer *b, uint16_t tag)
{
	put_bytes(b, tag, NULL, 0);
	return b->end - b->start;
}

void nest_end(struct buffer *b, size_t position)
{
	if (b->failed)
		return;
	uint8_t *value = b->data + b->start + position;
	store_u32(value - 4, (uint32_t)(b->data + b->end - value));
}

void put_error(struct buffer *b, uint32_t stream, const char *code, const char *field, int error, const char *message)
{
	size_t frame = frame_begin(b, FR_ERROR, stream);
	put_string(b, T_CODE, code);
	put_string(b, T_MESSAGE, message);
	if (field && *field)
		put_string(b, T_FIELD, field);
	if (error)
		put_int(b, T_ERRNO, (uint64_t)error);
	frame_end(b, frame);
}
