/* Numbers of the protocol in PROTOCOL.md. nomad_dsec/guest/frames.py holds the same ones (a unit test compares). */
#ifndef DSEC_WIRE_H
#define DSEC_WIRE_H

#define WIRE_VERSION 1
#define WIRE_MAGIC 0x43455344u /* upper half of VERSION in HELLO */
#define HEADER_SIZE 12u
#define MAX_PAYLOAD (2u * 1024 * 1024) /* of EXEC; every other frame is bounded by MAX_SMALL */
#define MAX_SMALL (160u * 1024)
#define MAX_DATA (64u * 1024)	 /* bytes in one DATA or OUTPUT frame */
#define WINDOW (256u * 1024)	 /* DATA bytes that the host may send on a stream before the first CREDIT */

#define FEATURE_CGROUP 1u /* exec trees are cgroups: a kill misses nobody */
#define FEATURE_POWEROFF 2u

/* host to guest */
#define FRAMES_IN(X)                                                                                                  \
	X(HELLO, 0x01) X(PING, 0x02) X(SHUTDOWN, 0x03) X(CREDIT, 0x04) X(CANCEL, 0x05) X(DATA, 0x06) X(DATA_END, 0x07)    \
	X(EXEC, 0x10) X(ATTACH, 0x11) X(SIGNAL, 0x12) X(RESIZE, 0x13) X(LIST_EXECS, 0x14) X(FORGET, 0x15)                  \
	X(READ, 0x20) X(WRITE, 0x21) X(LIST_DIR, 0x22) X(STAT, 0x23) X(MKDIR, 0x24) X(MOVE, 0x25) X(REMOVE, 0x26)          \
	X(CHMOD, 0x27) X(DOWNLOAD, 0x28) X(UPLOAD, 0x29) X(WATCH, 0x2a)                                                    \
	X(CLOCK_SET, 0x30) X(RESEED, 0x31) X(POLICY_PROBE, 0x32)

/* guest to host; DATA and CREDIT go both ways */
#define FRAMES_OUT(X)                                                                                                 \
	X(HELLO_OK, 0x81) X(OK, 0x82) X(ERROR, 0x83) X(ITEM, 0x84) X(STARTED, 0x90) X(OUTPUT, 0x91) X(EXITED, 0x92)

/* Fields: name, number, kind (I: 8 byte little-endian integer, B: bytes, N: nested fields). */
#define FIELDS(X)                                                                                                     \
	X(VERSION, 1, I) X(FEATURES, 2, I) X(MAX_PAYLOAD, 3, I) X(BOOT_ID, 4, B)                                           \
	X(CODE, 5, B) X(MESSAGE, 6, B) X(FIELD, 7, B) X(ERRNO, 8, I)                                                       \
	X(EXEC_ID, 10, B) X(ARGV, 11, B) X(ENV, 12, B) X(CWD, 13, B) X(USER, 14, B) X(RLIMIT, 15, B) X(PTY, 16, I)         \
	X(STDIN, 17, I) X(TIMEOUT_MS, 18, I) X(MAX_OUTPUT, 19, I) X(CREDIT, 20, I) X(COLLECT, 21, I)                       \
	X(NO_NEW_PRIVS, 22, I) X(SINCE, 23, I) X(SIGNUM, 24, I) X(TREE, 25, I) X(PID, 26, I) X(EXIT_CODE, 27, I)           \
	X(TERMSIG, 28, I) X(TIMED_OUT, 29, I) X(TOTAL, 30, I) X(HEAD_END, 31, I) X(TAIL_START, 32, I)                      \
	X(DURATION_US, 33, I) X(CPU_US, 34, I) X(MAXRSS_KIB, 35, I) X(START_CODE, 36, B) X(RUNNING, 37, I)                 \
	X(BACKGROUND, 38, I) X(HOST_SIGNAL, 39, I) X(ATTACHED, 40, I) X(OOM_KILLED, 41, I) X(HOLD, 42, I)                  \
	X(PATH, 50, B) X(TARGET, 51, B) X(OFFSET, 52, I) X(LENGTH, 53, I) X(MODE, 54, I) X(APPEND, 55, I)                  \
	X(PARENTS, 56, I) X(ATOMIC, 57, I) X(SIZE, 58, I) X(RECURSIVE, 59, I) X(FOLLOW, 60, I) X(REPLACE, 61, I)           \
	X(KIND, 62, B) X(UID, 63, I) X(GID, 64, I) X(MTIME_NS, 65, I) X(NLINK, 66, I) X(LINK, 67, B) X(ENTRY, 68, N)       \
	X(NAME, 69, B) X(REASON, 70, B) X(COOKIE, 71, I) X(IS_DIR, 72, I) X(KEEP_OWNER, 73, I) X(MISSING_OK, 74, I)        \
	X(FILES, 75, I) X(CLOCK_NS, 80, I) X(ENTROPY, 81, B) X(ATTEMPT, 82, N) X(ARG, 83, I) X(EXPECT, 84, I)

enum {
#define X(name, number) FR_##name = number,
	FRAMES_IN(X) FRAMES_OUT(X)
#undef X
#define X(name, number, kind) T_##name = number,
	FIELDS(X)
#undef X
};

#endif
