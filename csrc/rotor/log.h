/*
 * Logs of eager programs, in the format of DTR's prototype: one JSON object per line, with the
 * numbers as strings (those of MUTATE as integers; both are read everywhere).
 *
 *   CONSTANT NAME                           followed by MEMORY NAME MEMORY
 *   CALL NAME ARGS RESULT TIME              followed by MEMORY NAME MEMORY, ALIAS NAME ALIAS for
 *                                           every result in order; ALIAS -1 is a fresh storage,
 *                                           else an index into ARGS
 *   MUTATE NAME ARGS MUTATE TIME            copy on write: makes new tensors of the storages' sizes
 *                                           and rebinds the names ARGS[i], i in MUTATE
 *   COPY DST SRC, COPY_FROM DST SRC         bind and rebind a name to a tensor
 *   RELEASE NAME                            one reference less; ignored for undefined names
 *   PIN NAME                                rematerialize if need be, and keep for good
 *   ANNOTATE ANNOTATION                     START drops what came before it; BACKWARD is noted
 *
 * Reading gives a graph and commands on it. The reader is fed pieces of a file of any length; a log
 * that has been fed may be replayed and fed again. When it is finished, names that still hold a
 * reference are pinned, in the order in which the names were first defined (rematerialize), or
 * their storages are summed up (preallocate).
 */
#ifndef ROTOR_LOG_H
#define ROTOR_LOG_H

#include "log_commands.h"

enum rotor_output_condition {
    ROTOR_REMATERIALIZE = 0,
    ROTOR_PREALLOCATE = 1,
    ROTOR_LEAVE = 2 /* nothing is scheduled or summed */
};

/* cut_at_start: whether START drops what came before it. */
int rotor_log_init(rotor_log_t *self, bool cut_at_start);
void rotor_log_free(rotor_log_t *self);

/*
 * Reads the next piece. ROTOR_ERR_FORMAT fills *error; the log keeps what it had read before the
 * line that is wrong and cannot be fed any more (ROTOR_ERR_FORMAT again). The callback is asked
 * every few thousand lines with (bytes read of this piece, length).
 */
int rotor_log_feed(rotor_log_t *self, const char *text, int64_t length,
                   const rotor_callback_t *callback, rotor_log_error_t *error);

/* Ends the log: reads a last line without a newline; a CALL or CONSTANT that lacks its followers is
 * ROTOR_ERR_FORMAT (truncated). */
int rotor_log_finish(rotor_log_t *self, enum rotor_output_condition condition,
                     rotor_log_error_t *error);

/* The tensor that a name is bound to now, or -1. */
int32_t rotor_log_lookup(const rotor_log_t *self, const char *name, int64_t length);

/* References that a tensor holds from names after the commands read so far. */
int64_t rotor_log_references(const rotor_log_t *self, int32_t tensor);

/* Bytes that the log takes in memory, its reader included. */
int64_t rotor_log_footprint(const rotor_log_t *self);

#endif
