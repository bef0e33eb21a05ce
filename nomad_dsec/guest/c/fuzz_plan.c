/* A fuzz target for the reader of operation lists: LLVMFuzzerTestOneInput, and with FUZZ_MAIN a driver of its own that
 * takes files, or mutates them for N rounds with a seed. Nothing is carried out. Built by tests with sanitizers. */
#include "launch.h"

#include "init.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void init_options_default(struct init_options *o) { memset(o, 0, sizeof(*o)); }
int init_serve(const struct init_options *o) { return o->listen_fd; }

static volatile uint64_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	/* An exact copy on the heap, so that one byte too many is seen. */
	uint8_t *copy = malloc(size ? size : 1);
	struct plan p;
	struct op op;
	const char *why;
	if (!copy)
		return 0;
	memcpy(copy, data, size);
	if (plan_open(&p, copy, size, &why) == 0) {
		while (plan_next(&p, &op))
			for (uint32_t i = 0; i < op.nfields; i++) {
				sink += op.f[i].number + op.f[i].length;
				for (uint32_t k = 0; k < op.f[i].length; k++)
					sink += (uint8_t)op.f[i].data[k];
				if (op_kind_of(op.code)->signature[i] == 's')
					sink += strlen(op.f[i].data);
			}
		memset(copy + p.report_offset, 0xff, sizeof(struct report));
	}
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

int main(int argc, char **argv)
{
	static uint8_t seed[1 << 16], bytes[1 << 16];
	if (argc != 4)
		return 2;
	FILE *file = fopen(argv[1], "rb");
	size_t size = file ? fread(seed, 1, sizeof(seed), file) : 0;
	long rounds = atol(argv[2]), accepted = 0;
	state = strtoull(argv[3], NULL, 10) | 1;
	for (long round = 0; round < rounds; round++) {
		size_t now = size;
		struct plan p;
		const char *why;
		memcpy(bytes, seed, size);
		for (uint64_t flips = next_random() % 6; flips && now; flips--) {
			uint64_t at = next_random() % (next_random() % 3 ? now : (now < 64 ? now : 64));
			bytes[at] = next_random() % 2 ? (uint8_t)next_random() : (uint8_t)(bytes[at] + (next_random() % 3) - 1);
		}
		if (next_random() % 4 == 0)
			now = next_random() % (size + 1);
		accepted += plan_open(&p, bytes, now, &why) == 0;
		LLVMFuzzerTestOneInput(bytes, now);
	}
	printf("%ld of %ld accepted\n", accepted, rounds);
	return file && size ? 0 : 1;
}
#endif
