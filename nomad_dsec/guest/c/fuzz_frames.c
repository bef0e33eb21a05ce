/* Fuzz targets for what reads bytes of others: frames and fields, tar headers; and the output log against a plain model.
 * LLVMFuzzerTestOneInput for a fuzzer; with FUZZ_MAIN a driver of its own: `fuzz ROUNDS SEED`. Built with sanitizers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "log.h"
#include "tar.h"

#define MODEL_MAX (1u << 16)

static volatile uint64_t sink;

static void fuzz_frame(const uint8_t *data, size_t size)
{
	struct header h;
	const char *field = "";
	if (header_parse(data, size, &h) == PARSE_OK)
		sink += h.length + h.stream;
	struct span payload = {data, size};
	bool good = fields_check(payload, &field);
	struct field f, inner;
	struct buffer copy = {0};
	size_t frame = frame_begin(&copy, FR_OK, 7);
	for (struct span rest = payload; field_next(&rest, &f) == PARSE_OK;) {
		for (size_t i = 0; i < f.value.size; i++)
			sink += f.value.at[i];
		for (struct span below = f.value; field_next(&below, &inner) == PARSE_OK;)
			sink += inner.tag + strlen(field_name(inner.tag));
		put_bytes(&copy, f.tag, f.value.at, f.value.size);
	}
	frame_end(&copy, frame);
	sink += field_int(payload, T_SIZE, 3);
	/* What was read and written again is the same, when it was a list at all. */
	if (good && (buffer_size(&copy) != HEADER_SIZE + size || memcmp(copy.data + HEADER_SIZE, data, size) != 0))
		abort();
	buffer_free(&copy);
}

static bool read_span(void *context, uint8_t *to, size_t n)
{
	struct span *s = context;
	if (n > s->size)
		return false;
	memcpy(to, s->at, n);
	s->at += n;
	s->size -= n;
	return true;
}

static void fuzz_tar(const uint8_t *data, size_t size)
{
	static struct member m, again;
	static uint8_t header[NAME_ROOM * 3];
	struct span rest = {data, size};
	const char *why = "";
	while (tar_next(read_span, &rest, &m, &why) == TAR_MEMBER) {
		if (strlen(m.name) >= NAME_ROOM || strlen(m.link) >= NAME_ROOM || m.size >> 62)
			abort();
		m.sparse = false;
		/* What we write we read: only the fields that a header of ours carries. */
		struct span written = {header, tar_header(header, &m)};
		if (*m.name && memchr("0125", m.type, 4)) {
			bool same = tar_next(read_span, &written, &again, &why) == TAR_MEMBER && strcmp(again.name, m.name) == 0 &&
			            again.mode == m.mode && again.uid == m.uid && again.gid == m.gid;
			if (!same || (m.type == '0' && again.type == '0' && again.size != m.size))
				abort();
		}
		uint64_t skip = (m.size + BLOCK - 1) / BLOCK * BLOCK;
		if (skip > rest.size)
			break;
		rest.at += skip;
		rest.size -= skip;
	}
}

/* The input says how much of which stream is appended, and how large the log and its budget are. */
static void fuzz_log(const uint8_t *data, size_t size)
{
	static uint8_t model[MODEL_MAX], stream_of[MODEL_MAX];
	if (size < 4)
		return;
	struct budget budget = {.limit = (size_t)data[1] * 512 + 64};
	struct log log;
	size_t max = (size_t)data[0] * 40, total = 0;
	log_init(&log, &budget, max);
	for (size_t i = 2; i + 1 < size; i += 2) {
		size_t n = (size_t)data[i] * (data[i + 1] & 4 ? 16 : 1);
		int stream = 1 + (data[i + 1] & 1);
		if (n == 0 || total + n > MODEL_MAX)
			continue;
		for (size_t k = 0; k < n; k++)
			model[total + k] = (uint8_t)(total + k + data[i]);
		memset(stream_of + total, stream, n);
		log_append(&log, stream, model + total, n);
		total += n;
		if (log.total != total || budget.used > budget.limit)
			abort();
		if (i % 8 && i + 3 < size)
			continue;
		uint64_t offset = data[i] % 2 ? 0 : total / 2, kept = 0, last = offset;
		const uint8_t *bytes;
		int which;
		for (size_t got; (got = log_read(&log, &offset, 1 + data[i], &which, &bytes)); offset += got, last = offset) {
			if (offset < last || offset + got > total || memcmp(bytes, model + offset, got) != 0)
				abort();
			for (size_t k = 0; k < got; k++)
				if (stream_of[offset + k] != which)
					abort();
			kept += got;
		}
		if (offset != total || kept > max)
			abort();
	}
	if (total <= max && budget.limit > 4 * (max + 2048) && log.head_size + (log.total - log.tail_start) < total && total)
		if (log.tail_run_count || log.head_size != total)
			abort(); /* all of it fits, so nothing may be missing */
	log_trim(&log);
	log_drop(&log);
	if (budget.used)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size == 0)
		return 0;
	uint8_t *copy = malloc(size); /* of the exact size, so that one byte too many is seen */
	if (!copy)
		return 0;
	memcpy(copy, data + 1, size - 1);
	if (data[0] % 3 == 0)
		fuzz_frame(copy, size - 1);
	else if (data[0] % 3 == 1)
		fuzz_tar(copy, size - 1);
	else
		fuzz_log(copy, size - 1);
	free(copy);
	return 0;
}

#ifdef FUZZ_MAIN
static uint64_t state;

static uint64_t next_random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static void sum_up(uint8_t *block) /* a right checksum, or no mutation would get past it */
{
	unsigned sum = 8 * ' ';
	for (size_t i = 0; i < BLOCK; i++)
		sum += i >= 148 && i < 156 ? 0 : block[i];
	snprintf((char *)block + 148, 8, "%06o", sum & 0777777u);
	block[155] = ' ';
}

static size_t seed_frame(uint8_t *to)
{
	struct buffer b = {0};
	put_string(&b, T_EXEC_ID, "abc");
	put_int(&b, T_TIMEOUT_MS, 5);
	size_t nest = nest_begin(&b, T_ENTRY);
	put_string(&b, T_NAME, "name");
	put_int(&b, T_SIZE, 5);
	nest_end(&b, nest);
	size_t n = buffer_size(&b);
	memcpy(to, b.data + b.start, n);
	buffer_free(&b);
	return n;
}

static size_t seed_tar(uint8_t *to)
{
	static struct member m;
	m = (struct member){.mode = 0644, .uid = next_random() % 5000000, .size = 100, .type = '0'};
	memset(m.name, 'n', 1 + next_random() % 300);
	if (next_random() % 3 == 0)
		m.size = (uint64_t)1 << 40;
	return tar_header(to, &m);
}

int main(int argc, char **argv)
{
	static uint8_t bytes[1 << 17];
	if (argc != 3)
		return 2;
	long rounds = atol(argv[1]);
	state = strtoull(argv[2], NULL, 10) * 2654435761u | 1;
	for (long i = 0; i < rounds; i++) {
		size_t size;
		bytes[0] = (uint8_t)(i % 3);
		if (i % 3 == 0) {
			size = seed_frame(bytes + 1);
		} else if (i % 3 == 1) {
			size = seed_tar(bytes + 1);
		} else {
			size = 4 + next_random() % 200;
			for (size_t k = 0; k < size; k++)
				bytes[1 + k] = (uint8_t)next_random();
		}
		for (uint64_t changes = next_random() % 6; changes; changes--)
			bytes[1 + next_random() % size] = (uint8_t)next_random();
		if (i % 3 == 1)
			for (size_t at = 0; at + BLOCK <= size; at += BLOCK)
				if (next_random() % 4)
					sum_up(bytes + 1 + at);
		if (next_random() % 8 == 0)
			size = next_random() % size;
		LLVMFuzzerTestOneInput(bytes, size + 1);
	}
	printf("%ld\n", rounds);
	return 0;
}
#endif
