/* POLICY_PROBE, CLOCK_SET, RESEED. Part of workers. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "work.h"

#define ATTEMPTS_MAX 256
#define ATTEMPT_S 2u
#define CONNECT_MS 500
#define KILLED 1000

static int try_open(struct span target, int flags)
{
	char path[4096];
	if (target.size == 0 || target.size >= sizeof path)
		return EINVAL;
	memcpy(path, target.at, target.size);
	path[target.size] = 0;
	int fd = open(path, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	uint8_t byte;
	if (fd < 0)
		return errno;
	/* A masked file opens, as /dev/null, and has nothing to say; a real one shows itself in the first byte. */
	ssize_t n = flags == O_RDONLY ? read(fd, &byte, 1) : 1;
	int error = n < 0 ? errno : n == 0 ? ENODATA : 0;
	close(fd);
	return error;
}

static int try_connect(struct span target)
{
	struct sockaddr_storage address = {0};
	struct sockaddr_in *v4 = (struct sockaddr_in *)&address;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&address;
	char text[64];
	if (target.size >= sizeof text || target.size == 0)
		return EINVAL;
	memcpy(text, target.at, target.size);
	text[target.size] = 0;
	char *space = strchr(text, ' ');
	if (!space)
		return EINVAL;
	*space = 0;
	uint16_t port = htons((uint16_t)atoi(space + 1));
	bool is_v4 = inet_pton(AF_INET, text, &v4->sin_addr) == 1;
	if (!is_v4 && inet_pton(AF_INET6, text, &v6->sin6_addr) != 1)
		return EINVAL;
	address.ss_family = is_v4 ? AF_INET : AF_INET6;
	*(is_v4 ? &v4->sin_port : &v6->sin6_port) = port;
	int fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), error = 0;
	if (fd < 0)
		return errno;
	if (connect(fd, (struct sockaddr *)&address, is_v4 ? sizeof *v4 : sizeof *v6) != 0)
		error = errno;
	if (error == EINPROGRESS) {
		struct pollfd p = {.fd = fd, .events = POLLOUT};
		socklen_t size = sizeof error;
		if (poll(&p, 1, CONNECT_MS) != 1 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
			error = ETIMEDOUT;
	}
	close(fd);
	return error;
}

static int attempt(struct span fields)
{
	struct span kind = {0}, target = {0};
	struct field f;
	long arg[7] = {0};
	size_t args = 0;
	field_find(fields, T_KIND, &kind);
	field_find(fields, T_TARGET, &target);
	for (struct span rest = fields; field_next(&rest, &f) == PARSE_OK;)
		if (f.tag == T_ARG && args < 7)
			arg[args++] = (long)load_u64(f.value.at);
#define IS(text) (kind.size == sizeof text - 1 && memcmp(kind.at, text, sizeof text - 1) == 0)
	if (IS("open_read"))
		return try_open(target, O_RDONLY);
	if (IS("open_write"))
		return try_open(target, O_WRONLY);
	if (IS("connect"))
		return try_connect(target);
	if (IS("socket")) {
		int fd = socket((int)arg[0], (int)arg[1], (int)arg[2]), error = fd < 0 ? errno : 0;
		if (fd >= 0)
			close(fd);
		return error;
	}
	if (IS("syscall"))
		return syscall(arg[0], arg[1], arg[2], arg[3], arg[4], arg[5], arg[6]) == -1 ? errno : 0;
#undef IS
	return EINVAL;
}

/* In a child, from attempt `first` on, results into shared memory; it may die by one, and the next child goes on. */
static size_t run_from(const struct span *attempts, size_t count, size_t first, volatile int *results)
{
	fflush(NULL);
	pid_t pid = fork();
	if (pid < 0)
		work_fail_errno("attempt", errno);
	if (pid == 0) {
		struct rlimit none = {0, 0};
		setrlimit(RLIMIT_CORE, &none);
		setsid(); /* an attempt may be to signal its process group */
		for (size_t i = first; i < count; i++) {
			alarm(ATTEMPT_S);
			results[i] = attempt(attempts[i]);
		}
		_exit(0);
	}
	int status;
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	size_t next = first;
	while (next < count && results[next] >= 0)
		next++;
	if (next < count)
		results[next++] = WIFSIGNALED(status) ? KILLED + WTERMSIG(status) : ECHILD;
	return next;
}

static bool expected(struct span fields, int result)
{
	struct field f;
	while (field_next(&fields, &f) == PARSE_OK)
		if (f.tag == T_EXPECT && load_u64(f.value.at) == (uint64_t)result)
			return true;
	return false;
}

_Noreturn void policy_probe(struct span payload)
{
	static struct span attempts[ATTEMPTS_MAX];
	size_t count = 0;
	struct field f;
	for (struct span rest = payload; field_next(&rest, &f) == PARSE_OK;) {
		if (f.tag != T_ATTEMPT)
			continue;
		if (count == ATTEMPTS_MAX)
			work_fail("too_large", "attempt", 0, "at most 256 attempts");
		attempts[count++] = f.value;
	}
	volatile int *results =
	    mmap(NULL, sizeof *results * ATTEMPTS_MAX, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (results == MAP_FAILED)
		work_fail_errno("attempt", errno);
	for (size_t i = 0; i < count; i++)
		results[i] = -1;
	for (size_t next = 0; next < count;)
		next = run_from(attempts, count, next, results);
	size_t frame = frame_begin(&work_out, FR_OK, 0);
	for (size_t i = 0; i < count; i++) {
		size_t entry = nest_begin(&work_out, T_ENTRY);
		put_int(&work_out, T_ERRNO, (uint64_t)results[i]);
		put_int(&work_out, T_EXPECT, expected(attempts[i], results[i]));
		nest_end(&work_out, entry);
	}
	frame_end(&work_out, frame);
	work_send();
	work_done();
}

_Noreturn void clock_set(struct span payload)
{
	uint64_t ns = field_int(payload, T_CLOCK_NS, 0);
	struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
	if (ns == 0 || ns > INT64_MAX)
		work_fail("bad_field", "clock_ns", 0, "nanoseconds since the epoch");
	if (clock_settime(CLOCK_REALTIME, &t) != 0)
		work_fail_errno("clock_ns", errno);
	work_ok();
}

_Noreturn void reseed(struct span payload)
{
	struct span entropy;
	union {
		struct rand_pool_info info;
		uint8_t bytes[sizeof(struct rand_pool_info) + 512];
	} pool = {0};
	if (!field_find(payload, T_ENTROPY, &entropy) || entropy.size == 0 || entropy.size > 512)
		work_fail("bad_field", "entropy", 0, "1 to 512 bytes");
	int fd = open("/dev/urandom", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		work_fail_errno("entropy", errno);
	pool.info.entropy_count = (int)entropy.size * 8;
	pool.info.buf_size = (int)entropy.size;
	memcpy(pool.bytes + sizeof(struct rand_pool_info), entropy.at, entropy.size);
	if (ioctl(fd, RNDADDENTROPY, &pool.info) != 0 || ioctl(fd, RNDRESEEDCRNG) != 0)
		work_fail_errno("entropy", errno);
	work_ok();
}
