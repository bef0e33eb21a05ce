/* Reading a list of operations: bounds, kinds and signatures are checked for all of it before anything is done. */
#include "launch.h"

#include <string.h>

static uint32_t get32(const uint8_t *at)
{
	return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint32_t get16(const uint8_t *at)
{
	return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

static uint64_t get64(const uint8_t *at)
{
	return (uint64_t)get32(at) | (uint64_t)get32(at + 4) << 32;
}

static char letter_of(uint8_t kind)
{
	switch (kind) {
	case FIELD_NUMBER:
		return 'n';
	case FIELD_STRING:
		return 's';
	case FIELD_BLOB:
		return 'b';
	default:
		return '?';
	}
}

/* One field at *at (less than `left` bytes follow); the bytes it takes, or 0. */
static size_t read_field(const uint8_t *at, size_t left, char want, struct field *out)
{
	if (left < 8 || letter_of(at[0]) != want || at[1] || at[2] || at[3])
		return 0;
	uint32_t length = get32(at + 4);
	if (length > left - 8)
		return 0;
	size_t padded = ((size_t)length + 7) & ~(size_t)7;
	if (padded > left - 8)
		return 0;
	const uint8_t *data = at + 8;
	memset(out, 0, sizeof(*out));
	out->data = (const char *)data;
	out->length = length;
	if (want == 'n') {
		if (length != 8)
			return 0;
		out->number = get64(data);
	} else if (want == 's') {
		if (length == 0 || memchr(data, 0, length) != data + length - 1)
			return 0;
		out->length = length - 1;
	}
	return 8 + padded;
}

/* One operation at p->cursor: 1, 0 at the end, -1 when it is malformed. */
static int read_op(struct plan *p, struct op *op)
{
	if (p->cursor == p->ops_bytes)
		return 0;
	const uint8_t *at = p->ops + p->cursor;
	size_t left = p->ops_bytes - p->cursor;
	if (left < 8)
		return -1;
	uint32_t bytes = get32(at + 4);
	memset(op, 0, sizeof(*op));
	op->code = get16(at);
	op->nfields = get16(at + 2);
	const struct op_kind *kind = op_kind_of(op->code);
	if (!kind || bytes > left - 8 || op->nfields > PLAN_MAX_FIELDS || strlen(kind->signature) != op->nfields)
		return -1;
	const uint8_t *field = at + 8;
	size_t remaining = bytes;
	for (uint32_t i = 0; i < op->nfields; i++) {
		size_t used = read_field(field, remaining, kind->signature[i], &op->f[i]);
		if (!used)
			return -1;
		field += used;
		remaining -= used;
	}
	if (remaining)
		return -1;
	p->cursor += 8 + (size_t)bytes;
	return 1;
}

int plan_next(struct plan *p, struct op *op)
{
	return read_op(p, op) == 1;
}

int plan_open(struct plan *p, const uint8_t *bytes, size_t size, const char **why)
{
	memset(p, 0, sizeof(*p));
	*why = "header";
	if (size < 16 || size > PLAN_MAX_BYTES || get32(bytes) != PLAN_MAGIC || get16(bytes + 4) != PLAN_VERSION)
		return -1;
	p->op_count = get16(bytes + 6);
	p->ops = bytes + 16;
	p->ops_bytes = get32(bytes + 8);
	p->report_offset = get32(bytes + 12);
	*why = "sizes";
	if (p->op_count == 0 || p->op_count > PLAN_MAX_OPS || p->ops_bytes > size - 16 ||
	    p->report_offset < 16 + p->ops_bytes || p->report_offset % 8 || p->report_offset > size ||
	    size - p->report_offset < sizeof(struct report))
		return -1;
	*why = "operation";
	struct op op;
	uint32_t seen = 0;
	int got;
	while ((got = read_op(p, &op)) == 1)
		seen++;
	if (got < 0 || seen != p->op_count)
		return -1;
	p->cursor = 0;
	*why = "";
	return 0;
}
