/* The attacker's program: one static binary, one verb a run, answers as lines "key value" on stdout. */
#ifndef ATTACK_H
#define ATTACK_H

#include <stdint.h>

struct verb {
	const char *name;
	int (*run)(int argc, char **argv); /* argv[0] is the first argument after the verb */
};

extern const struct verb call_verbs[], flood_verbs[], net_verbs[];

int say(const char *key, long long value);
int say_errno(const char *key, long long result); /* errno's number when result is -1, else 0 */
long long number(const char *text);

#endif
