/* Attacks that use up something. Each stops at a bound of its own, in case nothing else stops it. */
#define _GNU_SOURCE
#include "attack.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1024u * 1024u)
#define MAX_CHILDREN 4096

/* forks N [SECONDS]: N sleeping children; how many came to be, and why the next did not. */
static int v_forks(int argc, char **argv)
{
	static pid_t children[MAX_CHILDREN];
	long long wanted = number(argv[0]), made = 0;
	int why = 0;
	while (made < wanted && made < MAX_CHILDREN) {
		pid_t pid = fork();
		if (pid < 0) {
			why = errno;
			break;
		}
		if (pid == 0) {
			pause();
			_exit(0);
		}
		children[made++] = pid;
	}
	say("children", made);
	say("errno", why);
	if (argc > 1)
		sleep((unsigned)number(argv[1]));
	for (long long i = 0; i < made; i++)
		kill(children[i], SIGKILL);
	while (wait(NULL) > 0 || errno == EINTR)
		;
	return 0;
}

/* forkbomb: children that fork for ever and hold the CPU, failed or not; ends only when killed. */
static int v_forkbomb(int argc, char **argv)
{
	(void)argc, (void)argv;
	signal(SIGTERM, SIG_IGN);
	while (fork() >= -1)
		;
	return 0;
}

/* memory MIB: touch that much; "touched" tells how far it came. */
static int v_memory(int argc, char **argv)
{
	long long wanted = argc ? number(argv[0]) : 1024;
	for (long long i = 0; i < wanted; i++) {
		char *piece = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (piece == MAP_FAILED)
			return say("errno", errno);
		memset(piece, (int)i + 1, MIB);
	}
	return say("touched", wanted);
}

static long long fill(int fd, long long mib)
{
	static char block[MIB];
	memset(block, 'x', sizeof(block));
	for (long long written = 0; written < mib * MIB;) {
		ssize_t got = write(fd, block, sizeof(block));
		if (got <= 0) {
			say("errno", got < 0 ? errno : EIO);
			return written / MIB;
		}
		written += got;
	}
	say("errno", 0);
	return mib;
}

/* disk PATH MIB: one file that large; the file stays. */
static int v_disk(int argc, char **argv)
{
	int fd = open(argv[0], O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (argc < 2 || fd < 0)
		return say("open", errno);
	return say("written_mib", fill(fd, number(argv[1])));
}

/* memfd MIB: the same in memory without a name. */
static int v_memfd(int argc, char **argv)
{
	int fd = memfd_create("flood", 0);
	if (argc < 1 || fd < 0)
		return say("open", errno);
	return say("written_mib", fill(fd, number(argv[0])));
}

/* inodes DIR N: N empty files. */
static int v_inodes(int argc, char **argv)
{
	long long wanted = argc > 1 ? number(argv[1]) : 0, made = 0;
	char path[512];
	int why = 0;
	for (; made < wanted; made++) {
		snprintf(path, sizeof(path), "%s/f%lld", argv[0], made);
		int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
		if (fd < 0) {
			why = errno;
			break;
		}
		close(fd);
	}
	say("files", made);
	say("errno", why);
	for (long long i = 0; i < made; i++) {
		snprintf(path, sizeof(path), "%s/f%lld", argv[0], i);
		unlink(path);
	}
	return 0;
}

/* descriptors N: open /dev/null N times. */
static int v_descriptors(int argc, char **argv)
{
	long long wanted = argc ? number(argv[0]) : 0, made = 0;
	int why = 0;
	while (made < wanted) {
		if (open("/dev/null", O_RDONLY) < 0) {
			why = errno;
			break;
		}
		made++;
	}
	say("opened", made);
	return say("errno", why);
}

/* yes MIB: write lines for ever, or until that much. */
static int v_yes(int argc, char **argv)
{
	static char block[65536];
	for (unsigned i = 0; i < sizeof(block); i++)
		block[i] = i % 2 ? '\n' : 'y';
	long long left = argc ? number(argv[0]) * MIB : -1;
	while (left) {
		ssize_t got = write(1, block, sizeof(block));
		if (got < 0)
			return 1;
		if (left > 0)
			left = left > got ? left - got : 0;
	}
	return 0;
}

/* sparse PATH: a file that says it is 1 TiB. */
static int v_sparse(int argc, char **argv)
{
	int fd = open(argc ? argv[0] : "sparse", O_WRONLY | O_CREAT, 0600);
	return say_errno("errno", fd < 0 ? -1 : ftruncate(fd, 1LL << 40));
}

/* sleep SECONDS, for a process to aim at. */
static int v_sleep(int argc, char **argv)
{
	say("pid", getpid());
	sleep(argc ? (unsigned)number(argv[0]) : 1);
	return 0;
}

const struct verb flood_verbs[] = {
	{"forks", v_forks}, {"forkbomb", v_forkbomb}, {"memory", v_memory}, {"disk", v_disk}, {"memfd", v_memfd},
	{"inodes", v_inodes}, {"descriptors", v_descriptors}, {"yes", v_yes}, {"sparse", v_sparse}, {"sleep", v_sleep},
	{NULL, NULL},
};
