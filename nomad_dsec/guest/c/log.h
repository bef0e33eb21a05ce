/* Output of one exec: the first bytes (head) and the last ones (a ring), with which stream each run of bytes is of.
 * Bounded by its maximum, and all logs together by a budget; never fails, only keeps less. No I/O; fuzzed. */
#ifndef DSEC_LOG_H
#define DSEC_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct budget {
	uint64_t limit, used;
	/* Free memory of something less dear; false when there is nothing. */
	bool (*evict)(void *context);
	void *context;
};

/* Kept bytes are [0, head_size) and [tail_start, total). A run is `first offset << 2 | stream`. */
struct log {
	struct budget *budget;
	uint8_t *head, *tail;
	uint64_t *head_runs, *tail_runs;
	size_t head_size, head_capacity, head_max;
	size_t tail_capacity, tail_max; /* byte at offset o is tail[o % tail_capacity] */
	size_t head_run_count, head_run_capacity;
	size_t tail_run_first, tail_run_count, tail_run_capacity; /* a ring */
	uint64_t tail_start, total;
};

void log_init(struct log *log, struct budget *budget, size_t max_bytes);
void log_append(struct log *log, int stream, const uint8_t *bytes, size_t n);
/* Next kept piece at or after *offset: sets *offset, *stream; returns its size (<= max), 0 at the end. */
size_t log_read(const struct log *log, uint64_t *offset, size_t max, int *stream, const uint8_t **bytes);
/* No more will be appended: give back what is not needed. */
void log_trim(struct log *log);
/* Forget the bytes, keep the counts. */
void log_drop(struct log *log);

#endif
