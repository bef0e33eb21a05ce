/* Reading a lane's requests: pointers into a message of which nothing is believed. Fuzzed by fuzz_call.c. */
#include "call.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static char **words(const uint8_t **at, const uint8_t *end, uint32_t count)
{
	char **list = count <= CALL_WORDS_MAX ? calloc(count + 1u, sizeof *list) : NULL;
	for (uint32_t i = 0; list && i < count; i++) {
		const uint8_t *stop = memchr(*at, 0, (size_t)(end - *at));
		if (!stop) {
			free(list);
			return NULL;
		}
		list[i] = (char *)(uintptr_t)*at;
		*at = stop + 1;
	}
	return list;
}

void call_free(struct call *c, int *fds, int count)
{
	free(c->argv);
	free(c->envp);
	free(c->fetch);
	if (c->mapped)
		munmap(c->mapped, c->r.payload_bytes);
	for (int i = 0; i < count; i++)
		close(fds[i]);
}

bool call_parse(struct call *c, const uint8_t *at, size_t size, const int *fds, int count)
{
	int next = 0;
	c->stdin_fd = c->exec_fd = -1;
	if (c->r.flags & CALL_PAYLOAD_FD) {
		struct stat st;
		if (next >= count || fstat(fds[next], &st) || (uint64_t)st.st_size < c->r.payload_bytes || !c->r.payload_bytes)
			return false;
		void *map = mmap(NULL, c->r.payload_bytes, PROT_READ, MAP_PRIVATE, fds[next++], 0);
		if (map == MAP_FAILED)
			return false;
		at = c->mapped = map;
		size = c->r.payload_bytes;
	}
	if (c->r.flags & CALL_STDIN_FD)
		c->stdin_fd = next < count ? fds[next++] : -1;
	if (c->r.flags & CALL_EXEC_FD)
		c->exec_fd = next < count ? fds[next++] : -1;
	c->end = at + size;
	c->argv = words(&at, c->end, c->r.argc);
	c->envp = c->argv ? words(&at, c->end, c->r.envc) : NULL;
	const uint8_t *after_env = at;
	c->fetch = c->envp ? words(&at, c->end, c->r.fetchc) : NULL;
	if (!c->fetch || (uint64_t)(c->end - at) < c->r.stdin_bytes)
		return false;
	c->stdin_at = at;
	c->files_at = at + c->r.stdin_bytes;
	c->words_end = after_env;
	return next == count && (c->r.argc > 0 || c->r.type != CALL_RUN);
}

bool call_next_file(const struct call *c, const uint8_t **at, struct call_file *f, const uint8_t **name,
		    const uint8_t **data)
{
	if ((size_t)(c->end - *at) < sizeof *f)
		return false;
	memcpy(f, *at, sizeof *f);
	*name = *at + sizeof *f;
	if (f->name_bytes == 0 || f->name_bytes >= CALL_NAME_ROOM || (size_t)(c->end - *name) < f->name_bytes ||
	    (uint64_t)(c->end - *name) - f->name_bytes < f->size)
		return false;
	*data = *name + f->name_bytes;
	*at = *data + f->size;
	return true;
}
