#include "planner_joint.h"

#include <string.h>

#include "planner_joint_least.h"
#include "planner_joint_walks.h"
#include "planner_search.h"
#include "probe.h"

#define FEW_MOVES 2000 /* of each start, and of the program for a larger budget */
#define MORE_MOVES 20  /* of each start, per operation */
#define MOST_ROUNDS 6 /* of all starts */
#define SMALL 400         /* operations of a graph that is searched twice */
#define MANY_MOVES 100000 /* with which it is */

enum { OTHER_STARTS = 4, STARTS = OTHER_STARTS + ROTOR_JOINT_WALKS, FEW = 3 };

typedef struct {
    const rotor_dataflow_t *graph;
    const rotor_link_t *link;
    int64_t budget;
    const rotor_callback_t *callback;
    int64_t done;  /* of earlier parts */
    int64_t total; /* of all parts */
    rotor_stop_t stop;
    rotor_search_t search;
    rotor_pricer_t pricer;
    rotor_random_t random;
    rotor_program_t work;
    rotor_program_t start;
    rotor_program_t few[FEW]; /* within the budget, fastest first */
    int64_t few_ns[FEW];
    int32_t few_count;
    rotor_program_t best;
    rotor_cost_t price;
    bool is_found;
} joint_t;

/* A part of the work reports as one of the whole. */
static bool part_goes_on(void *context, int64_t done, int64_t total) {
    const joint_t *c = context;
    (void)total;
    return rotor_ask(c->callback, rotor_min(c->done + done, c->total), c->total) == ROTOR_OK;
}

/* Keeps a program if it is within the budget and better than the best. */
static int joint_offer(joint_t *c, rotor_program_t *program) {
    rotor_cost_t price = {0};
    int ret = rotor_pricer_prune(&c->pricer, c->graph, program);
    if (ret == ROTOR_OK) {
        ret = rotor_program_simulate(c->graph, c->link, program->ops, program->length, &price,
                                     NULL, NULL, NULL);
    }
    if (ret != ROTOR_OK) {
        return ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret; /* the tier would hold too much */
    }
    bool is_better = !c->is_found || price.time_ns < c->price.time_ns ||
                     (price.time_ns == c->price.time_ns && price.link_ns < c->price.link_ns);
    if (price.peak_bytes > c->budget || !is_better) {
        return ROTOR_OK;
    }
    if ((ret = rotor_program_assign(&c->best, program->ops, program->length)) == ROTOR_OK) {
        c->price = price;
        c->is_found = true;
    }
    return ret;
}

/* Improves a copy of a program, offers it, and keeps it for more where it is one of the few best. */
static int joint_improve(joint_t *c, const rotor_program_t *start, int64_t moves) {
    rotor_cost_t price = {0};
    int32_t at = c->few_count;
    int ret = rotor_program_assign(&c->work, start->ops, start->length);
    if (ret == ROTOR_OK) {
        ret = rotor_search_improve(&c->search, c->graph, c->budget,
                                    rotor_random_next(&c->random), moves, &c->stop, &c->work);
    }
    if (ret == ROTOR_OK && (ret = joint_offer(c, &c->work)) == ROTOR_OK) {
        ret = rotor_pricer_price(&c->pricer, c->graph, c->work.ops, c->work.length, &price);
    }
    if (ret != ROTOR_OK) {
        return ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret;
    }
    while (at > 0 && price.time_ns < c->few_ns[at - 1]) {
        at--;
    }
    if (at == FEW) {
        return ROTOR_OK;
    }
    rotor_program_t last = c->few[FEW - 1];
    memmove(&c->few[at + 1], &c->few[at], (size_t)(FEW - 1 - at) * sizeof(c->few[0]));
    memmove(&c->few_ns[at + 1], &c->few_ns[at], (size_t)(FEW - 1 - at) * sizeof(c->few_ns[0]));
    c->few[at] = c->work;
    c->work = last;
    c->few_ns[at] = price.time_ns;
    c->few_count += c->few_count < FEW;
    return ROTOR_OK;
}

/* A program without the tier for a budget; where there is none, the one of *minimum, the least peak. */
static int without_tier(joint_t *c, int64_t budget, const rotor_planner_options_t *options,
                        rotor_program_t *program, int64_t *minimum) {
    rotor_callback_t callback = {.keep_going = part_goes_on, .context = c};
    rotor_cost_t price;
    *minimum = 0;
    int ret = rotor_planner_plan(c->graph, budget, options, &callback, program, &price, minimum);
    return ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret;
}

static int plain_order(joint_t *c, rotor_program_t *program) {
    int ret = ROTOR_OK;
    program->length = 0;
    for (int32_t op = 0; op < c->graph->operation_count && ret == ROTOR_OK; op++) {
        ret = rotor_program_append(program, op);
    }
    return ret;
}

/* The best of the walks with the tier; each of them is offered. */
static int walk_starts(joint_t *c, int64_t random_runs, rotor_program_t *starts) {
    rotor_joint_walks_t walks;
    rotor_joint_walks_init(&walks, c->graph, c->link, c->budget);
    int ret = rotor_joint_walks_run(&walks, random_runs, &c->random, &c->stop);
    for (int32_t k = 0; k < walks.count && ret == ROTOR_OK; k++) {
        ret = rotor_program_assign(&starts[k], walks.best[k].ops, walks.best[k].length);
        ret = ret == ROTOR_OK ? joint_offer(c, &walks.best[k]) : ret;
    }
    rotor_joint_walks_free(&walks);
    return ret;
}

/* The starts beside the program without the tier: for a larger budget, in the plain order, the caller's. */
static int find_starts(joint_t *c, const rotor_planner_options_t *options,
                       rotor_program_t *starts) {
    rotor_planner_options_t fast = *options;
    rotor_cost_t price = {0};
    int64_t minimum;
    int ret = plain_order(c, &starts[1]);
    if (ret == ROTOR_OK) {
        ret = rotor_pricer_price(&c->pricer, c->graph, starts[1].ops, starts[1].length, &price);
    }
    fast.random_runs = 0;
    fast.moves = rotor_min(FEW_MOVES, options->moves);
    fast.start = NULL;
    int64_t middle = c->budget + rotor_max(0, price.peak_bytes - c->budget) / 2;
    if (ret == ROTOR_OK) {
        ret = without_tier(c, middle, &fast, &starts[2], &minimum);
    }
    if (ret == ROTOR_OK && options->start != NULL) {
        ret = rotor_program_assign(&starts[3], options->start->ops, options->start->length);
    }
    return ret;
}

/*
 * The search from all starts a little, a few times where the graph is small, from the few best of these
 * programs, and from the best of all, or of these.
 */
static int joint_search(joint_t *c, int64_t moves, const rotor_program_t *starts, bool is_again) {
    int64_t n = c->graph->operation_count;
    int64_t enough = FEW_MOVES + MORE_MOVES * n;
    int64_t rounds = rotor_max(1, rotor_min(MOST_ROUNDS, moves / 2 / (enough * OTHER_STARTS)));
    int64_t each = rotor_min(moves / 10, enough);
    int64_t left = moves;
    int ret = ROTOR_OK;
    c->few_count = 0;
    for (int64_t k = 0; k < rounds * STARTS && ret == ROTOR_OK && !c->stop.is_over; k++) {
        int64_t at = k % STARTS;
        /* Walks begin once where they are beside the others. */
        bool is_due = at < OTHER_STARTS ? at > 0 || !is_again : k < STARTS;
        if (starts[at].length > 0 && is_due) {
            ret = joint_improve(c, &starts[at], each);
            left -= each;
        }
    }
    each = left / (2 * FEW);
    for (int32_t k = 0; k < FEW && rounds > 1 && ret == ROTOR_OK && !c->stop.is_over; k++) {
        if (k < c->few_count) {
            ret = rotor_program_assign(&c->start, c->few[k].ops, c->few[k].length);
            ret = ret == ROTOR_OK ? joint_improve(c, &c->start, each) : ret;
            left -= each;
        }
    }
    if (ret == ROTOR_OK && c->is_found && left > 0 && !c->stop.is_over) {
        const rotor_program_t *best = is_again && c->few_count > 0 ? &c->few[0] : &c->best;
        ret = rotor_program_assign(&c->start, best->ops, best->length);
        ret = ret == ROTOR_OK ? joint_improve(c, &c->start, left) : ret;
    }
    return ret;
}

/*
 * Small graphs are searched from the other starts first, and again from walks and without the program that
 * leaves the tier alone, to which the first search may keep.
 */
static int search_all(joint_t *c, const rotor_planner_options_t *options, int64_t moves,
                      int32_t searches, rotor_program_t *starts) {
    int ret = find_starts(c, options, starts);
    if (ret == ROTOR_OK && searches > 1 &&
        ((ret = joint_search(c, moves, starts, false)) != ROTOR_OK ||
         (c->is_found && c->price.time_ns <= c->graph->total_cost_ns))) {
        return ret;
    }
    if (ret == ROTOR_OK) {
        ret = walk_starts(c, options->random_runs, &starts[OTHER_STARTS]);
    }
    return ret == ROTOR_OK ? joint_search(c, moves, starts, searches > 1) : ret;
}

static bool has_actions(const rotor_dataflow_t *graph, const rotor_program_t *program) {
    for (int64_t k = 0; program != NULL && k < program->length; k++) {
        if (!rotor_item_is_run(graph, program->ops[k])) {
            return true;
        }
    }
    return false;
}

int rotor_joint_plan(const rotor_dataflow_t *graph, const rotor_link_t *link, int64_t budget,
                     const rotor_planner_options_t *options, const rotor_callback_t *callback,
                     rotor_program_t *program, rotor_cost_t *price, int64_t *minimum) {
    rotor_program_t starts[STARTS];
    rotor_planner_options_t alone = *options;
    int64_t parts = ROTOR_FIXED_SETTINGS + options->random_runs + options->moves;
    joint_t c = {.graph = graph, .link = link, .budget = budget, .callback = callback};
    int64_t began = options->time_limit_ns == 0 ? 0 : rotor_clock_ns();
    rotor_search_init(&c.search, link);
    rotor_pricer_init(&c.pricer);
    for (int32_t k = 0; k < STARTS; k++) {
        rotor_program_init(&starts[k]);
    }
    c.pricer.link = link;
    int64_t moves = options->moves == 0 ? 0 : 2 * options->moves + 5 * graph->operation_count;
    int32_t searches = graph->operation_count <= SMALL && options->moves >= MANY_MOVES ? 2 : 1;
    c.total = parts + searches * moves;
    rotor_random_init(&c.random, options->seed);
    alone.time_limit_ns = options->time_limit_ns / 2 + (options->time_limit_ns > 0);
    alone.start = has_actions(graph, options->start) ? NULL : options->start;
    int ret = graph->is_plain ? rotor_link_check(link) : ROTOR_ERR_BAD_OPERATION;
    rotor_callback_t rest = {.keep_going = part_goes_on, .context = &c};
    c.stop = (rotor_stop_t){
        .callback = &rest,
        .deadline_ns = options->time_limit_ns == 0 ? 0 : began + options->time_limit_ns,
        .total = searches * moves,
        .step = 1};
    if (ret != ROTOR_OK ||
        (ret = without_tier(&c, budget, &alone, &starts[0], minimum)) != ROTOR_OK) {
        goto out;
    }
    c.done = parts;
    if (*minimum > budget && (ret = rotor_joint_settle(graph, link, budget, &c.stop, &starts[0],
                                                       minimum)) == ROTOR_OK &&
        *minimum > budget) {
        ret = ROTOR_ERR_INFEASIBLE;
    }
    if (ret != ROTOR_OK || (ret = joint_offer(&c, &starts[0])) != ROTOR_OK) {
        goto out;
    }
    if (c.is_found && c.price.compute_ns <= graph->total_cost_ns) {
        goto found; /* nothing has to run twice */
    }
    if ((ret = search_all(&c, options, moves, searches, starts)) != ROTOR_OK) {
        goto out;
    }
    if (!c.is_found) {
        ret = ROTOR_ERR_INFEASIBLE;
        goto out;
    }
found:
    rotor_program_free(program);
    *program = c.best;
    rotor_program_init(&c.best);
    *price = c.price;
out:
    if (ret == ROTOR_ERR_INFEASIBLE) {
        rotor_program_free(program);
        *program = starts[0];
        rotor_program_init(&starts[0]);
    }
    for (int32_t k = 0; k < STARTS; k++) {
        rotor_program_free(&starts[k]);
    }
    for (int32_t k = 0; k < FEW; k++) {
        rotor_program_free(&c.few[k]);
    }
    rotor_program_free(&c.work);
    rotor_program_free(&c.start);
    rotor_program_free(&c.best);
    rotor_pricer_free(&c.pricer);
    rotor_search_free(&c.search);
    return ret;
}
