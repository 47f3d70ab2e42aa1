"""What the figures are drawn beside: the paper's accuracies, and the superclasses of CIFAR-100."""

PAPER = "Deng & Russakovsky, 2022"
"""Remember the Past: Distilling Datasets into Addressable Memories for Neural Networks, arXiv:2206.02916"""

PAPER_MEMORY = {
    "mnist": {1: (98.7, 0.7), 10: (99.3, 0.5), 50: (99.4, 0.4)},
    "fashion-mnist": {1: (88.5, 0.1), 10: (90.0, 0.7), 50: (91.2, 0.3)},
    "svhn": {1: (87.3, 0.1), 10: (89.1, 0.2), 50: (89.5, 0.2)},
    "cifar10": {1: (66.4, 0.4), 10: (71.2, 0.4), 50: (73.6, 0.5)},
    "cifar100": {1: (34.0, 0.4), 10: (42.9, 0.7)},
    "tinyimagenet": {1: (16.0, 0.7)},
}
"""Table 1 there: dataset -> images per class -> test accuracy in percent, mean and deviation of 20 ConvNets"""

PAPER_PER_CLASS = {
    "mnist": {1: (95.2, 0.3), 10: (98.8, 0.1), 50: (99.2, 0.1)},
    "fashion-mnist": {1: (83.9, 0.4), 10: (89.1, 0.2), 50: (90.4, 0.1)},
    "svhn": {1: (71.6, 0.8), 10: (83.1, 0.3), 50: (86.5, 0.2)},
    "cifar10": {1: (49.1, 0.6), 10: (62.4, 0.4), 50: (70.5, 0.4)},
    "cifar100": {1: (21.3, 0.6), 10: (34.7, 0.5)},
}
"""The same of vanilla BPTT (the appendix's table of ablations, column BPTT)"""

CIFAR100 = {
    "aquatic mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food containers": "bottle bowl can cup plate",
    "fruit and vegetables": "apple mushroom orange pear sweet_pepper",
    "household electrical devices": "clock keyboard lamp telephone television",
    "household furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large carnivores": "bear leopard lion tiger wolf",
    "large man-made outdoor things": "bridge castle house road skyscraper",
    "large natural outdoor scenes": "cloud forest mountain plain sea",
    "large omnivores and herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium-sized mammals": "fox porcupine possum raccoon skunk",
    "non-insect invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles 1": "bicycle bus motorcycle pickup_truck train",
    "vehicles 2": "lawn_mower rocket streetcar tank tractor",
}
"""superclass -> its five classes, as the dataset's own files name and order them"""

SUPERCLASS = {name: superclass for superclass, names in CIFAR100.items() for name in names.split()}


def by_superclass(names: list[str]) -> tuple[list[int], list[tuple[str, int]]]:
    """An order that brings classes of one superclass together, and each superclass with its number of classes.

    Where the names are not all of CIFAR-100, the order is the given one, without superclasses."""
    known = [SUPERCLASS.get(name.strip().lower().replace(" ", "_")) for name in names]
    if None in known:
        return list(range(len(names))), []
    places = {superclass: place for place, superclass in enumerate(CIFAR100)}
    order = sorted(range(len(names)), key=lambda number: (places[str(known[number])], names[number]))
    return order, [(superclass, known.count(superclass)) for superclass in CIFAR100 if superclass in known]
