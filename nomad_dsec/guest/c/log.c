#include "log.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BIG (64u * 1024) /* from here on memory is mapped, and not copied into forks */
#define SMALLEST 1024u
#define BYTES_PER_RUN 32u

static void memory_free(uint8_t *at, size_t size)
{
	if (size >= BIG)
		munmap(at, size);
	else
		free(at);
}

static uint8_t *memory_new(size_t size)
{
	if (size < BIG)
		return malloc(size);
	void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		return NULL;
	madvise(at, size, MADV_DONTFORK);
	return at;
}

static bool budget_take(struct budget *b, size_t n)
{
	while (b->used + n > b->limit)
		if (!b->evict || !b->evict(b->context))
			return false;
	b->used += n;
	return true;
}

/* Room for `want` bytes by doubling, at most max; NULL when the budget or memory forbids. */
static uint8_t *grow(struct log *log, size_t capacity, size_t least, size_t want, size_t max, size_t *grown)
{
	size_t size = capacity ? capacity : least;
	while (size < want)
		size *= 2;
	if (size > max)
		size = max;
	if (size <= capacity || !budget_take(log->budget, size))
		return NULL;
	uint8_t *at = memory_new(size);
	if (!at) {
		log->budget->used -= size;
		return NULL;
	}
	*grown = size;
	return at;
}

static void replace(struct log *log, uint8_t **at, size_t *capacity, uint8_t *fresh, size_t size)
{
	memory_free(*at, *capacity);
	log->budget->used -= *capacity;
	*at = fresh;
	*capacity = size;
}

void log_init(struct log *log, struct budget *budget, size_t max_bytes)
{
	*log = (struct log){.budget = budget, .head_max = max_bytes / 2, .tail_max = max_bytes - max_bytes / 2};
}

/* The runs count against the budget like the bytes; an array of them doubles, and a ring is unrolled by that. */
static bool run_room(struct log *log, uint64_t **runs, size_t *first, size_t count, size_t *capacity, size_t max)
{
	if (count < *capacity)
		return true;
	size_t size = 0;
	uint8_t *fresh = grow(log, *capacity * 8, 64, count * 8 + 8, max * 8, &size);
	if (!fresh)
		return false;
	uint64_t *to = (uint64_t *)(void *)fresh;
	for (size_t i = 0; i < count; i++)
		to[i] = (*runs)[(*first + i) % *capacity];
	size_t old = *capacity * 8;
	uint8_t *at = (uint8_t *)*runs;
	replace(log, &at, &old, fresh, size);
	*runs = (uint64_t *)(void *)at;
	*capacity = size / 8;
	*first = 0;
	return true;
}

static size_t runs_max(size_t bytes) { return bytes / BYTES_PER_RUN + 16; }

static size_t head_append(struct log *log, int stream, const uint8_t *bytes, size_t n)
{
	if (log->head_size >= log->head_max)
		return 0;
	if (n > log->head_max - log->head_size)
		n = log->head_max - log->head_size;
	if (log->head_size + n > log->head_capacity) {
		size_t size = 0;
		uint8_t *fresh = grow(log, log->head_capacity, SMALLEST, log->head_size + n, log->head_max, &size);
		if (fresh) {
			if (log->head_size)
				memcpy(fresh, log->head, log->head_size);
			replace(log, &log->head, &log->head_capacity, fresh, size);
		}
	}
	if (n > log->head_capacity - log->head_size)
		n = log->head_capacity - log->head_size;
	size_t last = log->head_run_count, first = 0;
	if (n && (last == 0 || (int)(log->head_runs[last - 1] & 3) != stream)) {
		if (run_room(log, &log->head_runs, &first, last, &log->head_run_capacity, runs_max(log->head_max)))
			log->head_runs[log->head_run_count++] = (uint64_t)log->head_size << 2 | (unsigned)stream;
		else
			n = 0;
	}
	if (n == 0) { /* no memory for more of it: the head is closed, the ring takes over */
		log->head_max = log->head_size;
		return 0;
	}
	memcpy(log->head + log->head_size, bytes, n);
	log->head_size += n;
	return n;
}

static uint64_t *tail_run(const struct log *log, size_t i)
{
	return &log->tail_runs[(log->tail_run_first + i) % log->tail_run_capacity];
}

/* Forget kept bytes before `offset`, and the runs that end there. */
static void tail_forget(struct log *log, uint64_t offset)
{
	if (offset <= log->tail_start)
		return;
	log->tail_start = offset;
	while (log->tail_run_count > 1 && *tail_run(log, 1) >> 2 <= offset) {
		log->tail_run_first = (log->tail_run_first + 1) % log->tail_run_capacity;
		log->tail_run_count--;
	}
}

static void tail_grow(struct log *log, size_t n)
{
	size_t used = (size_t)(log->total - log->tail_start), size = 0;
	if (used + n <= log->tail_capacity || log->tail_capacity >= log->tail_max)
		return;
	uint8_t *fresh = grow(log, log->tail_capacity, SMALLEST, used + n, log->tail_max, &size);
	if (!fresh)
		return;
	for (size_t done = 0; done < used;) { /* bytes move, as their place is offset modulo capacity */
		uint64_t offset = log->tail_start + done;
		size_t from = (size_t)(offset % log->tail_capacity), to = (size_t)(offset % size), piece = used - done;
		if (piece > log->tail_capacity - from)
			piece = log->tail_capacity - from;
		if (piece > size - to)
			piece = size - to;
		memcpy(fresh + to, log->tail + from, piece);
		done += piece;
	}
	replace(log, &log->tail, &log->tail_capacity, fresh, size);
}

static void tail_append(struct log *log, int stream, const uint8_t *bytes, size_t n)
{
	if (log->tail_run_count == 0)
		log->tail_start = log->total;
	tail_grow(log, n);
	size_t last = log->tail_run_count;
	bool need_run = last == 0 || (int)(*tail_run(log, last - 1) & 3) != stream;
	if (need_run && !run_room(log, &log->tail_runs, &log->tail_run_first, last, &log->tail_run_capacity,
	                          runs_max(log->tail_max))) {
		if (last < 2) { /* nothing to write the run on: this piece is lost, and what was before it */
			log->total += n;
			log->tail_start = log->total;
			log->tail_run_count = 0;
			return;
		}
		tail_forget(log, *tail_run(log, 1) >> 2);
	}
	if (log->tail_capacity == 0) {
		log->total += n;
		log->tail_start = log->total;
		return;
	}
	if (need_run) {
		log->tail_run_count++;
		*tail_run(log, log->tail_run_count - 1) = log->total << 2 | (unsigned)stream;
	}
	size_t skip = n > log->tail_capacity ? n - log->tail_capacity : 0;
	uint64_t end = log->total + n;
	for (size_t done = skip; done < n;) {
		size_t to = (size_t)((log->total + done) % log->tail_capacity), piece = n - done;
		if (piece > log->tail_capacity - to)
			piece = log->tail_capacity - to;
		memcpy(log->tail + to, bytes + done, piece);
		done += piece;
	}
	log->total = end;
	if (end - log->tail_start > log->tail_capacity)
		tail_forget(log, end - log->tail_capacity);
}

void log_append(struct log *log, int stream, const uint8_t *bytes, size_t n)
{
	if (log->tail_run_count == 0 && log->total == log->head_size) { /* head still open and without a gap */
		size_t taken = head_append(log, stream, bytes, n);
		log->total += taken;
		bytes += taken;
		n -= taken;
	}
	if (n)
		tail_append(log, stream, bytes, n);
}

static size_t piece_in(const uint64_t *run, const uint64_t *after, uint64_t offset, uint64_t end, int *stream)
{
	uint64_t limit = after && *after >> 2 < end ? *after >> 2 : end;
	*stream = (int)(*run & 3);
	return (size_t)(limit - offset);
}

size_t log_read(const struct log *log, uint64_t *offset, size_t max, int *stream, const uint8_t **bytes)
{
	size_t n;
	if (*offset < log->head_size) {
		size_t low = 0, high = log->head_run_count; /* last run that starts at or before the offset */
		while (high - low > 1) {
			size_t middle = (low + high) / 2;
			if (log->head_runs[middle] >> 2 <= *offset)
				low = middle;
			else
				high = middle;
		}
		const uint64_t *after = low + 1 < log->head_run_count ? &log->head_runs[low + 1] : NULL;
		n = piece_in(&log->head_runs[low], after, *offset, log->head_size, stream);
		*bytes = log->head + *offset;
		return n < max ? n : max;
	}
	if (log->tail_run_count == 0 || *offset >= log->total) {
		if (*offset < log->total)
			*offset = log->total;
		return 0;
	}
	if (*offset < log->tail_start)
		*offset = log->tail_start;
	if (*offset >= log->total)
		return 0;
	size_t low = 0, high = log->tail_run_count;
	while (high - low > 1) {
		size_t middle = (low + high) / 2;
		if (*tail_run(log, middle) >> 2 <= *offset)
			low = middle;
		else
			high = middle;
	}
	const uint64_t *after = low + 1 < log->tail_run_count ? tail_run(log, low + 1) : NULL;
	n = piece_in(tail_run(log, low), after, *offset, log->total, stream);
	size_t from = (size_t)(*offset % log->tail_capacity);
	if (n > log->tail_capacity - from)
		n = log->tail_capacity - from;
	*bytes = log->tail + from;
	return n < max ? n : max;
}

void log_trim(struct log *log)
{
	if (log->head_capacity < BIG && log->head_size < log->head_capacity) {
		if (log->head_size == 0) {
			replace(log, &log->head, &log->head_capacity, NULL, 0);
		} else {
			uint8_t *less = realloc(log->head, log->head_size);
			if (less) {
				log->head = less;
				log->budget->used -= log->head_capacity - log->head_size;
				log->head_capacity = log->head_size;
			}
		}
	}
	log->head_max = log->head_size;
}

void log_drop(struct log *log)
{
	size_t head_runs = log->head_run_capacity * 8, tail_runs = log->tail_run_capacity * 8;
	uint8_t *head_at = (uint8_t *)log->head_runs, *tail_at = (uint8_t *)log->tail_runs;
	replace(log, &log->head, &log->head_capacity, NULL, 0);
	replace(log, &log->tail, &log->tail_capacity, NULL, 0);
	replace(log, &head_at, &head_runs, NULL, 0);
	replace(log, &tail_at, &tail_runs, NULL, 0);
	*log = (struct log){.budget = log->budget, .tail_start = log->total, .total = log->total};
}
