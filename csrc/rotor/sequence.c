#include "sequence.h"

#include <string.h>

#include "vector.h"

/* Which copy of x[n] is the model's output: none yet, the plain one, the one in xbar[n-1], or one
 * that only the caller still holds. */
enum { OUTPUT_NONE = 0, OUTPUT_PLAIN = 1, OUTPUT_INSIDE = 2, OUTPUT_ALONE = 3 };

void rotor_sequence_init(rotor_sequence_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_sequence_free(rotor_sequence_t *self) {
    rotor_free(self->ops);
    memset(self, 0, sizeof(*self));
}

int rotor_sequence_append(rotor_sequence_t *self, enum rotor_kind kind, int64_t stage) {
    int ret = ROTOR_RESERVE(self->ops, self->length, self->capacity, 1);
    if (ret == ROTOR_OK) {
        self->ops[self->length++] = (rotor_op_t){.kind = (int32_t)kind, .stage = (int32_t)stage};
    }
    return ret;
}

int rotor_sequence_append_forward(rotor_sequence_t *self, int64_t i, int64_t j) {
    int ret = ROTOR_OK;
    for (int64_t k = i; k < j && ret == ROTOR_OK; k++) {
        ret = rotor_sequence_append(self, k == i ? ROTOR_FCK : ROTOR_FN, k);
    }
    return ret;
}

int rotor_memory_init(rotor_memory_t *self, const rotor_chain_t *chain) {
    memset(self, 0, sizeof(*self));
    self->has_x = rotor_calloc((size_t)(3 * chain->n + 1), sizeof(*self->has_x));
    if (self->has_x == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    self->has_xbar = self->has_x + chain->n + 1;
    self->has_run = self->has_xbar + chain->n;
    self->has_x[0] = 1;
    self->chain = chain;
    self->live = chain->x[0];
    self->gradient = chain->n + 1;
    self->output = OUTPUT_NONE;
    return ROTOR_OK;
}

void rotor_memory_free(rotor_memory_t *self) {
    rotor_free(self->has_x);
    memset(self, 0, sizeof(*self));
}

static bool has_input(const rotor_memory_t *s, int64_t i) {
    return s->has_x[i] || (i > 0 && s->has_xbar[i - 1]);
}

static void drop_x(rotor_memory_t *s, int64_t i) {
    const rotor_chain_t *c = s->chain;

    if (i == 0 || !s->has_x[i]) {
        return;
    }
    s->has_x[i] = 0;
    if (i == c->n && s->output == OUTPUT_PLAIN) {
        s->output = OUTPUT_ALONE;
        s->live -= c->hold_output ? 0 : c->x[i];
    } else {
        s->live -= c->x[i];
    }
}

static void forward(rotor_memory_t *s, int32_t kind, int64_t i, rotor_price_t *price) {
    const rotor_chain_t *c = s->chain;
    bool replaces = s->has_x[i + 1] != 0;

    price->time_ns = c->forward_ns[i];
    price->peak = s->live + c->x[i + 1] + c->fn_tmp[i];
    if (kind == ROTOR_FN && !s->has_xbar[i]) {
        drop_x(s, i);
    }
    if (!replaces) {
        s->live += c->x[i + 1];
        s->has_x[i + 1] = 1;
    }
    if (i + 1 == c->n && s->output == OUTPUT_NONE) {
        s->output = OUTPUT_PLAIN;
    }
}

static int record(rotor_memory_t *s, int64_t i, rotor_price_t *price) {
    const rotor_chain_t *c = s->chain;

    if (s->has_xbar[i]) {
        return ROTOR_ERR_TWICE;
    }
    if (s->has_run[i] && c->once[i] != 0) {
        return ROTOR_ERR_ONCE;
    }
    s->has_run[i] = 1;
    price->time_ns = c->forward_ns[i];
    price->peak = s->live + c->xbar[i] + c->fe_tmp[i];
    s->live += c->xbar[i];
    s->has_xbar[i] = 1;
    if (i + 1 == c->n && s->output == OUTPUT_NONE) {
        s->output = OUTPUT_INSIDE;
    }
    return ROTOR_OK;
}

static int loss(rotor_memory_t *s, rotor_price_t *price) {
    const rotor_chain_t *c = s->chain;

    if (!has_input(s, c->n)) {
        return s->gradient <= c->n ? ROTOR_ERR_TWICE : ROTOR_ERR_NO_INPUT;
    }
    if (s->gradient <= c->n) {
        return ROTOR_ERR_TWICE;
    }
    price->time_ns = 0;
    price->peak = s->live + c->grad[c->n] + c->loss_tmp;
    s->live += c->grad[c->n];
    s->gradient = c->n;
    drop_x(s, c->n);
    return ROTOR_OK;
}

static int backward(rotor_memory_t *s, int64_t i, rotor_price_t *price) {
    const rotor_chain_t *c = s->chain;

    if (s->gradient <= i) {
        return ROTOR_ERR_TWICE;
    }
    if (s->gradient != i + 1) {
        return ROTOR_ERR_NO_GRADIENT;
    }
    if (!s->has_xbar[i]) {
        return ROTOR_ERR_NO_TAPE;
    }
    if (!has_input(s, i)) {
        return ROTOR_ERR_NO_INPUT;
    }
    price->time_ns = c->backward_ns[i];
    price->peak = s->live + c->grad[i] + c->b_tmp[i];
    s->live += c->grad[i] + c->pgrad[i] - c->grad[i + 1] - c->xbar[i];
    s->has_xbar[i] = 0;
    s->gradient = i;
    drop_x(s, i + 1);
    drop_x(s, i);
    if (i + 1 == c->n && s->output == OUTPUT_INSIDE) {
        s->output = OUTPUT_ALONE;
        s->live += c->hold_output ? c->x[c->n] : 0;
    }
    return ROTOR_OK;
}

int rotor_step(rotor_memory_t *self, rotor_op_t op, rotor_price_t *price) {
    int ret = ROTOR_OK;
    int64_t n = self->chain->n;
    int64_t i = op.stage;

    if (i < 0 || i > n || (i == n) != (op.kind == ROTOR_LOSS)) {
        return ROTOR_ERR_BAD_OPERATION;
    }
    switch (op.kind) {
    case ROTOR_FN:
    case ROTOR_FCK:
        if (!has_input(self, i)) {
            return ROTOR_ERR_NO_INPUT;
        }
        if (self->chain->once[i] != 0) {
            return ROTOR_ERR_ONCE;
        }
        forward(self, op.kind, i, price);
        break;
    case ROTOR_FE:
        if (!has_input(self, i)) {
            return ROTOR_ERR_NO_INPUT;
        }
        ret = record(self, i, price);
        break;
    case ROTOR_LOSS:
        ret = loss(self, price);
        break;
    case ROTOR_B:
        ret = backward(self, i, price);
        break;
    default:
        return ROTOR_ERR_BAD_OPERATION;
    }
    price->live = self->live;
    return ret;
}

int rotor_simulate(const rotor_chain_t *chain, const rotor_op_t *ops, int64_t length,
                   rotor_result_t *result, int64_t *peaks, int64_t *lives) {
    rotor_memory_t memory;
    rotor_price_t price = {0, 0, 0};
    int ret = rotor_memory_init(&memory, chain);

    *result = (rotor_result_t){.time_ns = 0, .peak = chain->x[0], .failed_at = -1};
    for (int64_t k = 0; k < length && ret == ROTOR_OK; k++) {
        ret = rotor_step(&memory, ops[k], &price);
        if (ret == ROTOR_OK && result->time_ns > INT64_MAX - price.time_ns) {
            ret = ROTOR_ERR_OVERFLOW;
        }
        if (ret != ROTOR_OK) {
            result->failed_at = k;
            break;
        }
        result->time_ns += price.time_ns;
        result->peak = rotor_max(result->peak, price.peak);
        if (peaks != NULL) {
            peaks[k] = price.peak;
        }
        if (lives != NULL) {
            lives[k] = price.live;
        }
    }
    if (ret == ROTOR_OK && memory.gradient != 0) {
        ret = ROTOR_ERR_INCOMPLETE;
        result->failed_at = length;
    }
    rotor_memory_free(&memory);
    return ret;
}
