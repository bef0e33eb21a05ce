/* The lane's loop: one message in, one call, one message out; what the next call needs is made after the answer. */
#include "call.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FDS_MAX 4
#define KEEP_BYTES (256u * 1024)
#define FIRST_DISK (64ull * 1024 * 1024)

struct lane {
	int control, zygote;
	struct call_meters meters;
	struct call_slot slot;
	struct bytes out, err, files, body;
};

uint64_t call_now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

uint8_t *bytes_room(struct bytes *b, size_t n)
{
	if (b->capacity - b->size < n) {
		size_t capacity = b->capacity ? b->capacity : 4096;
		while (capacity - b->size < n)
			capacity *= 2;
		uint8_t *more = realloc(b->at, capacity);
		if (!more) {
			b->failed = true;
			return NULL;
		}
		b->at = more;
		b->capacity = capacity;
	}
	return b->at + b->size;
}

bool bytes_add(struct bytes *b, const void *data, size_t n)
{
	uint8_t *at = bytes_room(b, n);
	if (at) {
		memcpy(at, data, n);
		b->size += n;
	}
	return at != NULL;
}

void bytes_free(struct bytes *b)
{
	free(b->at);
	*b = (struct bytes){0};
}

/* Emptied for the next call; small ones keep their memory, which saves page faults. */
static void bytes_reset(struct bytes *b)
{
	if (b->capacity > KEEP_BYTES)
		bytes_free(b);
	b->size = 0;
	b->failed = false;
}

/* One message and its descriptors; -1 when the node is gone. */
static ssize_t receive(int control, void *buffer, size_t size, int *fds, int *count)
{
	struct iovec part = {buffer, size};
	union {
		char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
		struct cmsghdr align;
	} space;
	struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
	*count = 0;
	ssize_t n;
	do {
		n = recvmsg(control, &m, MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n <= 0)
		return -1;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			*count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			memcpy(fds, CMSG_DATA(c), (size_t)*count * sizeof(int));
		}
	return n;
}

static int body_fd(const struct bytes *const parts[3])
{
	int fd = memfd_create("dsec-result", MFD_CLOEXEC);
	for (int i = 0; fd >= 0 && i < 3; i++)
		for (size_t done = 0; done < parts[i]->size;) {
			ssize_t n = write(fd, parts[i]->at + done, parts[i]->size - done);
			if (n <= 0 && errno != EINTR) {
				close(fd);
				return -1;
			}
			done += n > 0 ? (size_t)n : 0;
		}
	return fd;
}

static void answer(struct lane *l, struct call_reply *reply)
{
	const struct bytes *const parts[3] = {&l->out, &l->err, &l->files};
	reply->magic = CALL_MAGIC;
	reply->out_bytes = l->out.size;
	reply->err_bytes = l->err.size;
	reply->files_bytes = l->files.size;
	struct iovec iov[4] = {{reply, sizeof *reply}};
	size_t total = 0;
	for (int i = 0; i < 3; i++) {
		iov[i + 1] = (struct iovec){parts[i]->at, parts[i]->size};
		total += parts[i]->size;
	}
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} space = {0};
	struct msghdr m = {.msg_iov = iov, .msg_iovlen = 4};
	int fd = -1;
	if (total > CALL_INLINE_MAX) {
		fd = body_fd(parts);
		reply->flags |= fd >= 0 ? CALL_BODY_FD : CALL_BROKEN;
		if (fd < 0)
			reply->out_bytes = reply->err_bytes = reply->files_bytes = reply->filec = 0;
		m.msg_iovlen = 1;
	}
	if (fd >= 0) {
		m.msg_control = &space;
		m.msg_controllen = sizeof space;
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(c), &fd, sizeof fd);
	}
	if (sendmsg(l->control, &m, MSG_NOSIGNAL) < 0)
		_exit(0);
	if (fd >= 0)
		close(fd);
}

static void run(struct lane *l, struct call *c, struct call_reply *reply)
{
	if (l->slot.reaper && l->slot.disk_bytes != c->r.disk_bytes)
		slot_end(&l->slot);
	if (!l->slot.reaper && !slot_make(&l->slot, c->r.disk_bytes)) {
		reply->flags |= CALL_BROKEN | CALL_NOT_STARTED;
		reply->step = STEP_SLOT;
		reply->error = (uint32_t)errno;
		return;
	}
	if ((c->r.flags & CALL_ZYGOTE) && l->zygote < 0) {
		reply->flags |= CALL_NOT_STARTED | CALL_NO_ZYGOTE;
		return;
	}
	call_run(c, &l->slot, &l->meters, l->control, l->zygote, reply, &l->out, &l->err);
	/* Its files outlive its mount namespace for as long as we hold their directory. */
	int work = l->slot.work_fd;
	l->slot.work_fd = -1;
	if (!slot_end(&l->slot))
		reply->flags |= CALL_BROKEN;
	if (c->r.fetchc)
		reply->filec = files_fetch(work, c, &l->files);
	close(work);
}

static void setup(struct lane *l, struct call *c, int *fds, int *count, struct call_reply *reply)
{
	if (*count == 3) {
		l->meters = (struct call_meters){fds[0], fds[1], fds[2]};
		*count = 0; /* they are the lane's now */
	}
	if (c->r.argc) {
		zygote_start(c, &l->zygote);
		reply->flags |= l->zygote < 0 ? CALL_NO_ZYGOTE : 0;
	}
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
	if (!slot_make(&l->slot, c->r.disk_bytes ? c->r.disk_bytes : FIRST_DISK)) {
		reply->flags |= CALL_BROKEN;
		reply->step = STEP_SLOT;
		reply->error = (uint32_t)errno;
	}
}

static void serve_one(struct lane *l, uint8_t *buffer, size_t size, int *fds, int count)
{
	struct call c = {.stdin_fd = -1, .exec_fd = -1};
	struct call_reply reply = {0};
	if (size < sizeof c.r)
		_exit(1);
	memcpy(&c.r, buffer, sizeof c.r);
	reply.id = c.r.id;
	uint64_t disk_bytes = c.r.disk_bytes;
	if (c.r.magic == CALL_MAGIC && c.r.type == CALL_CANCEL) {
		return; /* it came after the end */
	} else if (c.r.magic == CALL_MAGIC && c.r.type == CALL_SETUP &&
		   call_parse(&c, buffer + sizeof c.r, size - sizeof c.r, fds, 0)) {
		setup(l, &c, fds, &count, &reply);
	} else if (c.r.magic == CALL_MAGIC && c.r.type == CALL_RUN &&
		   call_parse(&c, buffer + sizeof c.r, size - sizeof c.r, fds, count)) {
		run(l, &c, &reply);
	} else {
		reply.flags |= CALL_NOT_STARTED;
		reply.step = STEP_REQUEST;
		reply.error = EPROTO;
	}
	call_free(&c, fds, count);
	reply.memory_bytes = meter_memory(&l->meters);
	answer(l, &reply);
	bytes_reset(&l->out);
	bytes_reset(&l->err);
	bytes_reset(&l->files);
	if (!l->slot.reaper && !(reply.flags & CALL_BROKEN))
		slot_make(&l->slot, disk_bytes ? disk_bytes : FIRST_DISK); /* if it can't, the next call says why */
}

int lane_serve(const struct init_options *o)
{
	static uint8_t buffer[sizeof(struct call_request) + CALL_INLINE_MAX];
	struct lane l = {.control = o->listen_fd, .zygote = -1, .meters = {-1, -1, -1}, .slot = {.pidfd = -1, .work_fd = -1}};
	int fds[FDS_MAX], count;
	umask(0);
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	signal(SIGPIPE, SIG_IGN);
	fcntl(l.control, F_SETFD, FD_CLOEXEC);
	int null = open("/dev/null", O_RDONLY); /* what programs without stdin read */
	if (null < 0 || (null != 0 && dup2(null, 0) < 0))
		return 1;
	if (null > 2)
		close(null);
	for (;;) {
		/* Between calls the zygote has nothing to say: what is readable then is its end, and this lane's. */
		struct pollfd p[2] = {{.fd = l.control, .events = POLLIN}, {.fd = l.zygote, .events = POLLIN}};
		if (poll(p, 2, -1) < 0 && errno != EINTR)
			return 1;
		if (p[1].revents)
			return 0;
		if (!p[0].revents)
			continue;
		ssize_t n = receive(l.control, buffer, sizeof buffer, fds, &count);
		if (n < 0)
			return 0;
		serve_one(&l, buffer, (size_t)n, fds, count);
	}
}
