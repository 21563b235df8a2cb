/* What bind_log.c and bind_log_writer.c share. */
#ifndef ROTOR_BIND_LOG_H
#define ROTOR_BIND_LOG_H

#include "binding.h"

#define ROTOR_FASTCALL(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

/* Whether a method got `least` to `most` arguments, else a TypeError. */
bool rotor_are_counted(const char *method, Py_ssize_t nargs, Py_ssize_t least, Py_ssize_t most);

/* An integer from least to most; bools are none. False with an exception. */
bool rotor_get_integer(PyObject *object, const char *what, int64_t least, int64_t most,
                       int64_t *integer);

int rotor_add_log_writer(PyObject *module);

#endif
