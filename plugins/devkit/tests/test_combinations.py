"""`third_of`: a third of the combinations, in which every value of the other parameters occurs."""

from itertools import product

from dovetail_devkit.combinations import third_of

PARAMETERS = ("ab", (1, 2, 3), "x", (True, False), range(5))


def test_a_third_of_the_combinations_is_selected():
    chosen = list(third_of(*PARAMETERS))
    assert len(chosen) == len(set(chosen)) == 20
    assert set(chosen) < set(product(*PARAMETERS))


def test_each_combination_of_all_other_parameters_occurs():
    for omitted, parameter in enumerate(PARAMETERS):
        others = [values for index, values in enumerate(PARAMETERS) if index != omitted]
        left = {(*item[:omitted], *item[omitted + 1 :]) for item in third_of(*PARAMETERS)}
        assert (left == set(product(*others))) == (len(parameter) >= 3)
