#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "loop.h"
#include "state.h"

#define HEARTBEAT_US 1000000ull
#define EVENTS_MAX 64

uint8_t scratch[MAX_DATA + HEADER_SIZE];
static int epoll_fd = -1;
static bool stopped;
static int stop_status;
static uint64_t frozen_us, frozen_seen_us;
static int frozen_fd = -1;
static void **later;
static size_t later_count, later_capacity;
static struct source children;

static uint64_t clock_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

uint64_t now_us(void) { return clock_us() - frozen_us; }

void source_add(struct source *s, int fd, uint32_t events, void (*ready)(struct source *, uint32_t))
{
	s->fd = fd;
	s->ready = ready;
	struct epoll_event e = {.events = events, .data.ptr = s};
	if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e) != 0 && errno != EPERM)
		abort(); /* EPERM: a regular file as stream, always ready, never used so */
}

void source_events(struct source *s, uint32_t events)
{
	struct epoll_event e = {.events = events, .data.ptr = s};
	epoll_ctl(epoll_fd, EPOLL_CTL_MOD, s->fd, &e);
}

void source_forget(struct source *s) { epoll_ctl(epoll_fd, EPOLL_CTL_DEL, s->fd, NULL); }

void source_close(struct source *s)
{
	if (s->fd < 0)
		return;
	source_forget(s); /* a forked child may for a moment hold a duplicate, which would keep the registration alive */
	close(s->fd);
	s->fd = -1;
}

void loop_free_later(void *memory)
{
	if (later_count == later_capacity) {
		size_t capacity = later_capacity ? later_capacity * 2 : 16;
		void **more = realloc(later, capacity * sizeof *later);
		if (!more)
			return; /* leaked, which is better than a use after free */
		later = more;
		later_capacity = capacity;
	}
	later[later_count++] = memory;
}

void loop_stop(int status)
{
	stopped = true;
	stop_status = status;
}

static void reap(void)
{
	for (;;) {
		int status;
		struct rusage usage;
		pid_t pid = wait4(-1, &status, WNOHANG, &usage);
		if (pid <= 0)
			return;
		struct exec *e = execs_live;
		while (e && (e->reaped || e->pid != pid))
			e = e->next_live;
		if (e)
			exec_reaped(e, status, &usage);
		else
			worker_reaped(pid); /* or an orphan that came to us: reaping it was all */
	}
}

static void children_ready(struct source *s, uint32_t events)
{
	(void)events;
	struct signalfd_siginfo info[8];
	while (read(s->fd, info, sizeof info) == (ssize_t)sizeof info)
		;
	reap();
}

void loop_init(void)
{
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	/* Only SIGCHLD is blocked: a blocked signal would reach PID 1 even from inside, where all others are ignored. */
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (epoll_fd < 0 || fd < 0)
		abort();
	source_add(&children, fd, EPOLLIN, children_ready);
	if (options.cgroup_fd >= 0)
		frozen_fd = openat(options.cgroup_fd, "cgroup.stat.local", O_RDONLY | O_CLOEXEC);
}

/* How long our cgroup was frozen in all: cgroup.stat.local of cgroup2 (Linux 6.18); false where nothing tells. */
static bool frozen_total(uint64_t *us)
{
	static const char key[] = "frozen_usec ";
	char text[256];
	ssize_t n = frozen_fd < 0 ? -1 : pread(frozen_fd, text, sizeof text - 1, 0);
	if (n <= 0)
		return false;
	text[n] = 0;
	const char *at = strstr(text, key);
	*us = at ? strtoull(at + sizeof key - 1, NULL, 10) : 0;
	return at != NULL;
}

/* A freezer stops us together with the programs, and their timeouts must not run meanwhile. Whoever waits wakes at
 * least each second while a timeout is pending, so that a wake-up that is much too late tells how long it was. Programs
 * that leave us no CPU make us late too, and must not prolong their time by that: the kernel's count has the last word. */
static void note_freeze(uint64_t expected_us)
{
	uint64_t now = clock_us(), total;
	if (now <= expected_us + HEARTBEAT_US)
		return;
	uint64_t late = now - expected_us; /* more than that would set our clock back */
	if (frozen_total(&total)) {
		if (total - frozen_seen_us < late)
			late = total - frozen_seen_us;
		frozen_seen_us = total;
	}
	frozen_us += late;
}

static int wait_ms(uint64_t *expected_us)
{
	uint64_t next = execs_deadline(), now = now_us(), workers = workers_deadline();
	if (workers < next)
		next = workers;
	if (conns_deadline() < next)
		next = conns_deadline();
	*expected_us = UINT64_MAX / 2;
	if (next == UINT64_MAX)
		return -1;
	uint64_t wait = next > now ? next - now : 0;
	if (wait > HEARTBEAT_US)
		wait = HEARTBEAT_US;
	*expected_us = clock_us() + wait;
	return (int)((wait + 999) / 1000);
}

int loop_run(void)
{
	struct epoll_event events[EVENTS_MAX];
	while (!stopped) {
		uint64_t expected_us;
		int timeout = wait_ms(&expected_us);
		int n = epoll_wait(epoll_fd, events, EVENTS_MAX, timeout);
		note_freeze(expected_us);
		for (int i = 0; i < n; i++) {
			struct source *s = events[i].data.ptr;
			if (s->fd >= 0)
				s->ready(s, events[i].events);
		}
		execs_tick();
		workers_tick();
		conns_tick();
		conns_flush();
		while (later_count)
			free(later[--later_count]);
	}
	return stop_status;
}
