/* A fuzz target for the reader of a lane's requests: a header, then its payload; LLVMFuzzerTestOneInput, and with
 * FUZZ_MAIN a driver of its own, `fuzz ROUNDS SEED`. Nothing is run. Built by tests with sanitizers. */
#include "call.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES_MAX (1u << 16)

static volatile uint64_t sink;

/* Every byte that a run would look at, so that one too far is seen. */
static void look(const struct call *c)
{
	char *const *const lists[3] = {c->argv, c->envp, c->fetch};
	const uint32_t counts[3] = {c->r.argc, c->r.envc, c->r.fetchc};
	for (int k = 0; k < 3; k++)
		for (uint32_t i = 0; i < counts[k]; i++)
			sink += strlen(lists[k][i]);
	if (counts[0] && lists[0][counts[0]])
		abort(); /* execve wants its end */
	for (uint64_t i = 0; i < c->r.stdin_bytes; i++)
		sink += c->stdin_at[i];
	if (c->files_at > c->end || c->words_end > c->stdin_at)
		abort();
	const uint8_t *at = c->files_at, *name, *data;
	struct call_file f;
	for (uint32_t i = 0; i < c->r.filec && call_next_file(c, &at, &f, &name, &data); i++) {
		if (f.name_bytes >= CALL_NAME_ROOM || data + f.size > c->end || at != data + f.size)
			abort();
		for (uint32_t k = 0; k < f.name_bytes; k++)
			sink += name[k];
		for (uint64_t k = 0; k < f.size; k++)
			sink += data[k];
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct call c = {0};
	if (size < sizeof c.r)
		return 0;
	memcpy(&c.r, data, sizeof c.r);
	size -= sizeof c.r;
	uint8_t *copy = malloc(size ? size : 1); /* of the exact size, so that one byte too many is seen */
	int fds[3], count = 0;
	if (!copy)
		return 0;
	memcpy(copy, data + sizeof c.r, size);
	if (c.r.flags & CALL_PAYLOAD_FD) {
		fds[count] = memfd_create("fuzz", MFD_CLOEXEC);
		if (write(fds[count++], copy, size) != (ssize_t)size)
			abort();
	}
	for (uint32_t flag = CALL_STDIN_FD; flag <= CALL_EXEC_FD; flag <<= 1)
		if (c.r.flags & flag)
			fds[count++] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (c.r.id % 7 == 0 && count)
		close(fds[--count]); /* one less than the flags say */
	if (call_parse(&c, copy, size, fds, count)) {
		look(&c);
		sink++;
	}
	call_free(&c, fds, count);
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

static size_t add_words(uint8_t *to, uint32_t count)
{
	size_t n = 0;
	for (uint32_t i = 0; i < count; i++) {
		size_t length = next_random() % 20;
		memset(to + n, 'a' + (int)(i % 26), length);
		to[n + length] = 0;
		n += length + 1;
	}
	return n;
}

/* A request that makes sense. */
static size_t seed_call(uint8_t *to)
{
	struct call_request r = {.magic = CALL_MAGIC, .type = CALL_RUN, .id = next_random()};
	uint8_t *at = to + sizeof r;
	r.flags = (uint32_t)(next_random() & (CALL_PAYLOAD_FD | CALL_STDIN_FD | CALL_EXEC_FD));
	r.argc = 1 + (uint32_t)(next_random() % 5);
	r.envc = (uint32_t)(next_random() % 5);
	r.fetchc = (uint32_t)(next_random() % 3);
	r.filec = (uint32_t)(next_random() % 4);
	r.stdin_bytes = next_random() % 50;
	at += add_words(at, r.argc + r.envc + r.fetchc);
	memset(at, 'i', r.stdin_bytes);
	at += r.stdin_bytes;
	for (uint32_t i = 0; i < r.filec; i++) {
		struct call_file f = {.name_bytes = 1 + (uint32_t)(next_random() % 9), .mode = 0644, .size = next_random() % 99};
		memcpy(at, &f, sizeof f);
		at += sizeof f;
		memset(at, 'f', f.name_bytes + f.size);
		at += f.name_bytes + f.size;
	}
	r.payload_bytes = (uint64_t)(at - to) - sizeof r;
	memcpy(to, &r, sizeof r);
	return (size_t)(at - to);
}

static void mutate(uint8_t *bytes, size_t size)
{
	uint64_t at = next_random() % (next_random() % 2 ? size : sizeof(struct call_request));
	if (next_random() % 2)
		bytes[at] = (uint8_t)next_random();
	else
		bytes[at] = (uint8_t)(bytes[at] + (next_random() % 3) - 1);
}

int main(int argc, char **argv)
{
	static uint8_t bytes[BYTES_MAX];
	if (argc != 3)
		return 2;
	long rounds = atol(argv[1]), read = 0;
	state = strtoull(argv[2], NULL, 10) * 2654435761u | 1;
	for (long i = 0; i < rounds; i++) {
		size_t size = seed_call(bytes);
		for (uint64_t changes = next_random() % 5; changes; changes--)
			mutate(bytes, size);
		if (next_random() % 8 == 0)
			size = next_random() % size;
		uint64_t before = sink;
		LLVMFuzzerTestOneInput(bytes, size);
		read += sink != before;
	}
	printf("%ld of %ld read\n", read, rounds);
	return 0;
}
#endif
