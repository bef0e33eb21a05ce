/* Attacks that are one or a few system calls. */
#define _GNU_SOURCE
#include "attack.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_RUNS 4096

/* sys N [arg...]: a raw call. "@text" is a pointer to text, "#n" a pointer to n zero bytes, else a 64-bit number. */
static int v_sys(int argc, char **argv)
{
	unsigned long long args[7] = {0};
	for (int i = 0; i < argc && i < 7; i++) {
		if (argv[i][0] == '@')
			args[i] = (unsigned long long)(uintptr_t)(argv[i] + 1);
		else if (argv[i][0] == '#')
			args[i] = (unsigned long long)(uintptr_t)calloc(1, (size_t)number(argv[i] + 1));
		else
			args[i] = (unsigned long long)number(argv[i]);
	}
	return say_errno("errno", syscall((long)args[0], args[1], args[2], args[3], args[4], args[5], args[6]));
}

/* open FLAGS PATH...: a line "<path> <errno>" each; flags is "r" or "w". */
static int v_open(int argc, char **argv)
{
	int flags = argv[0][0] == 'w' ? O_WRONLY : O_RDONLY;
	for (int i = 1; i < argc; i++) {
		int fd = open(argv[i], flags | O_NONBLOCK | O_CLOEXEC);
		say_errno(argv[i], fd);
		if (fd >= 0)
			close(fd);
	}
	return 0;
}

/* peek PATH...: "<path> <bytes read of the first 64>", or minus errno. An empty directory counts 0, others -EISDIR. */
static int v_peek(int argc, char **argv)
{
	char buffer[64];
	for (int i = 0; i < argc; i++) {
		struct stat st;
		if (stat(argv[i], &st) == 0 && S_ISDIR(st.st_mode)) {
			int entries = -2;
			DIR *dir = opendir(argv[i]);
			while (dir && readdir(dir))
				entries++;
			say(argv[i], dir ? entries : -errno);
			if (dir)
				closedir(dir);
			continue;
		}
		int fd = open(argv[i], O_RDONLY | O_NONBLOCK);
		ssize_t got = fd < 0 ? -1 : read(fd, buffer, sizeof(buffer));
		say(argv[i], got < 0 ? -errno : got);
		if (fd >= 0)
			close(fd);
	}
	return 0;
}

/* ioctl PATH NUMBER: the 64-bit number as it is, with a zeroed argument. */
static int v_ioctl(int argc, char **argv)
{
	static char argument[4096];
	int fd = open(argv[0], O_RDWR | O_CREAT, 0600);
	if (argc < 2 || fd < 0)
		return 1;
	return say_errno("errno", syscall(SYS_ioctl, (long)fd, (unsigned long)number(argv[1]), argument));
}

/* swapext TARGET DONOR HIGH: exchange the contents of two XFS files (struct xfs_swapext of fs/xfs/libxfs/xfs_fs.h). */
struct xfs_bstime {
	int64_t sec;
	int32_t nsec;
};
struct xfs_bstat {
	uint64_t ino;
	uint16_t mode, nlink;
	uint32_t uid, gid, rdev;
	int32_t blksize;
	int64_t size;
	struct xfs_bstime atime, mtime, ctime;
	int64_t blocks;
	uint32_t xflags;
	int32_t extsize, extents;
	uint32_t gen;
	uint16_t projid_lo, forkoff, projid_hi;
	uint8_t sick_checked_pad[6];
	uint32_t cowextsize;
	uint32_t dmevmask;
	uint16_t dmstate, aextents;
};
struct xfs_swapext {
	int64_t version, fdtarget, fdtmp;
	int64_t offset, length;
	char pad[16];
	struct xfs_bstat stat;
};
_Static_assert(sizeof(struct xfs_swapext) == 192, "XFS_IOC_SWAPEXT encodes 192 bytes");

static int v_swapext(int argc, char **argv)
{
	struct stat st;
	struct xfs_swapext swap = {.version = 0};
	swap.fdtarget = open(argv[0], O_RDWR);
	swap.fdtmp = open(argv[1], O_RDWR);
	if (argc < 3 || swap.fdtarget < 0 || swap.fdtmp < 0 || fstat((int)swap.fdtarget, &st))
		return say("open", errno);
	swap.length = st.st_size;
	swap.stat = (struct xfs_bstat){
		.ino = st.st_ino, .size = st.st_size,
		.mtime = {st.st_mtim.tv_sec, (int32_t)st.st_mtim.tv_nsec},
		.ctime = {st.st_ctim.tv_sec, (int32_t)st.st_ctim.tv_nsec},
	};
	unsigned long request = (unsigned long)number(argv[2]) << 32 | 0xc0c0586dUL;
	return say_errno("errno", syscall(SYS_ioctl, swap.fdtarget, request, &swap));
}

/* clone FLAGS / clone3 FLAGS: a child with these flags that ends at once. */
static int v_clone(int argc, char **argv)
{
	long pid = syscall(SYS_clone, argc ? number(argv[0]) | SIGCHLD : SIGCHLD, 0, 0, 0, 0);
	if (pid == 0)
		_exit(0);
	return say_errno("errno", pid);
}

static int v_clone3(int argc, char **argv)
{
	struct clone_args args = {.flags = argc ? (uint64_t)number(argv[0]) : 0, .exit_signal = SIGCHLD};
	long pid = syscall(SYS_clone3, &args, sizeof(args));
	if (pid == 0)
		_exit(0);
	return say_errno("errno", pid);
}

/* int80: getpid through the i386 table. */
static int v_int80(int argc, char **argv)
{
	(void)argc, (void)argv;
#ifdef __x86_64__
	long result;
	__asm__ volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory", "r8", "r9", "r10", "r11");
	return say("errno", result > 0 ? 0 : -result);
#else
	return say("errno", ENOSYS);
#endif
}

/* tamper PID: every way to read, trace and end another process. */
static int v_tamper(int argc, char **argv)
{
	pid_t pid = argc ? (pid_t)number(argv[0]) : 1;
	const char *files[] = {"mem", "environ", "maps", "exe", "root", "cwd", "fd", "ns/mnt", "syscall", "auxv"};
	char path[64], key[32];
	for (unsigned i = 0; i < sizeof(files) / sizeof(*files); i++) {
		snprintf(path, sizeof(path), "/proc/%d/%s", pid, files[i]);
		int fd = open(path, i ? O_RDONLY : O_RDWR);
		snprintf(key, sizeof(key), "open_%s", files[i]);
		say_errno(key, fd);
		if (fd >= 0)
			close(fd);
	}
	say_errno("attach", ptrace(PTRACE_ATTACH, pid, 0, 0));
	say_errno("seize", ptrace(PTRACE_SEIZE, pid, 0, 0));
	say_errno("process_vm_readv", syscall(SYS_process_vm_readv, pid, NULL, 0, NULL, 0, 0));
	int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	say_errno("pidfd_getfd", syscall(SYS_pidfd_getfd, pidfd, 0, 0));
	snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", pid);
	int score = open(path, O_WRONLY);
	say_errno("oom_score_adj", score < 0 ? -1 : write(score, "1000", 4));
	return 0;
}

/* lower_oom: make the kernel spare us. */
static int v_lower_oom(int argc, char **argv)
{
	(void)argc, (void)argv;
	int fd = open("/proc/self/oom_score_adj", O_WRONLY);
	return say_errno("errno", fd < 0 ? -1 : write(fd, "-1000", 5));
}

/* kill PID SIGNAL... */
static int v_kill(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		say_errno(argv[i], kill((pid_t)number(argv[0]), (int)number(argv[i])));
	return 0;
}

/* overwrite RUNS PATH...: try to write each path RUNS times; "<path> <errno>" of the last, "successes". */
static int v_overwrite(int argc, char **argv)
{
	long long runs = number(argv[0]), successes = 0;
	for (int i = 1; i < argc; i++) {
		int last = 0;
		for (long long run = 0; run < runs && run < MAX_RUNS; run++) {
			int fd = open(argv[i], O_WRONLY);
			if (fd < 0) {
				last = errno;
				continue;
			}
			last = write(fd, "#!evil\n", 7) < 0 ? errno : 0;
			successes += last == 0;
			close(fd);
		}
		say(argv[i], last);
	}
	return say("successes", successes);
}

/* fds: how many descriptors there are beyond 0, 1, 2. */
static int v_fds(int argc, char **argv)
{
	(void)argc, (void)argv;
	int extra = 0;
	for (int fd = 3; fd < 65536; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			extra++;
	say("extra", extra);
	char *cwd = getcwd(NULL, 0);
	return say("cwd_is_absolute", cwd && cwd[0] == '/');
}

/* shocker: open the root of whatever file system PATH is on by a made-up handle (inode 2 or its own). */
static int v_shocker(int argc, char **argv)
{
	union {
		struct file_handle handle;
		char bytes[sizeof(struct file_handle) + MAX_HANDLE_SZ];
	} space = {.handle.handle_bytes = MAX_HANDLE_SZ};
	int mount_id, mount = open(argc ? argv[0] : "/", O_RDONLY | O_DIRECTORY);
	if (name_to_handle_at(AT_FDCWD, argc ? argv[0] : "/", &space.handle, &mount_id, 0))
		say_errno("name_to_handle_at", -1);
	return say_errno("errno", open_by_handle_at(mount, &space.handle, O_RDONLY));
}

/* flip A B MILLISECONDS: exchange two names as fast as it goes. */
static int v_flip(int argc, char **argv)
{
	struct timespec now, end;
	long long flips = 0, ms = argc > 2 ? number(argv[2]) : 0;
	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += ms / 1000;
	end.tv_nsec += ms % 1000 * 1000000;
	do {
		for (int i = 0; i < 64; i++)
			flips += syscall(SYS_renameat2, AT_FDCWD, argv[0], AT_FDCWD, argv[1], 2 /* RENAME_EXCHANGE */) == 0;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
	return say("flips", flips);
}

/* ids: who we are, for set-uid copies. */
static int v_ids(int argc, char **argv)
{
	(void)argc, (void)argv;
	say("uid", getuid());
	return say("euid", geteuid());
}

/* mmapexec: a page that is written and then run, as a JIT does: must keep working. */
static int v_jit(int argc, char **argv)
{
	(void)argc, (void)argv;
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return say("errno", page == MAP_FAILED ? errno : 0);
}

const struct verb call_verbs[] = {
	{"sys", v_sys}, {"open", v_open}, {"peek", v_peek}, {"ioctl", v_ioctl}, {"swapext", v_swapext},
	{"clone", v_clone}, {"clone3", v_clone3}, {"int80", v_int80}, {"tamper", v_tamper}, {"kill", v_kill},
	{"overwrite", v_overwrite}, {"lower_oom", v_lower_oom}, {"fds", v_fds}, {"flip", v_flip}, {"shocker", v_shocker}, {"ids", v_ids}, {"jit", v_jit}, {NULL, NULL},
};
