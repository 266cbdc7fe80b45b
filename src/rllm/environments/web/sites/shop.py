"""A shop's books and its rules: products, orders, reviews, a basket. No HTML here.

    draw_shop(seed) ──► Shop ──► set_quantity, place_order, cancel_order, … ──► Shop
                                 what breaks a rule raises FormError and changes nothing

Two shops are equal when all their books are, which is how tasks are judged.
"""

import random
from dataclasses import dataclass, field

from rllm.environments.web.sites.pages import FormError

STATUSES = ("placed", "shipped", "delivered", "cancelled")
MAX_STARS = 5
NOUNS = {
    "Lighting": ("Lamp", "Lantern", "Candle"),
    "Kitchen": ("Kettle", "Teapot", "Bowl"),
    "Garden": ("Spade", "Rake", "Bucket"),
    "Office": ("Stapler", "Notebook", "Globe"),
}
"""Category -> what is sold in it."""
ADJECTIVES = (
    *("Amber", "Birch", "Copper", "Dusky", "Frosty", "Golden", "Hazel", "Ivory"),
    *("Linen", "Misty", "Olive", "Pearl"),
)
PEOPLE = ("Bruno Diaz", "Chiara Rossi", "Deniz Kaya", "Elif Demir", "Farid Aziz")
USER = "Ada Lind"
"""The user of the shop; the admin pages show the orders of all."""
STREETS = ("Oak Street", "Mill Lane", "High Road", "Station Square", "Harbour Walk")
OPINIONS = (
    "Does what it should.",
    "Broke after a week.",
    "A fine gift.",
    "Smaller than I thought.",
    "Lovely.",
)
_NUM_ORDERS = 8
_NUM_REVIEWS = 12
_FIRST_ORDER = 1001


@dataclass(kw_only=True, slots=True)
class Product:
    name: str
    category: str
    cents: int
    stock: int


@dataclass(kw_only=True, slots=True)
class Order:
    customer: str
    quantities: dict[str, int]
    """Product -> pieces."""
    cents: int
    """The price at the time of the order."""
    address: str
    status: str


@dataclass(kw_only=True, slots=True)
class Review:
    product: str
    author: str
    stars: int
    text: str


@dataclass(kw_only=True, slots=True)
class Shop:
    """The books. Products are known by name, orders and reviews by number."""

    products: dict[str, Product]
    orders: dict[int, Order]
    reviews: dict[int, Review]
    address: str
    basket: dict[str, int] = field(default_factory=dict[str, int])

    def product(self, name: str) -> Product:
        if name not in self.products:
            raise FormError("There is no such product.")
        return self.products[name]

    def order(self, number: int) -> Order:
        if number not in self.orders:
            raise FormError("There is no such order.")
        return self.orders[number]

    def reviews_of(self, name: str) -> dict[int, Review]:
        return {number: each for number, each in self.reviews.items() if each.product == name}

    def basket_cents(self) -> int:
        return sum(self.products[name].cents * count for name, count in self.basket.items())

    # ---- what customers do -------------------------------------------------------------------------------

    def set_quantity(self, name: str, quantity: int) -> None:
        """In the basket; 0 takes it out."""
        if quantity > self.product(name).stock:
            raise FormError(f"There are only {self.products[name].stock} pieces of {name}.")
        if quantity:
            self.basket[name] = quantity
        else:
            self.basket.pop(name, None)

    def place_order(self) -> int:
        """Order what is in the basket. Returns the number of the order."""
        if not self.basket:
            raise FormError("The basket is empty.")
        number = max(self.orders) + 1
        self.orders[number] = Order(
            customer=USER,
            quantities=dict(self.basket),
            cents=self.basket_cents(),
            address=self.address,
            status="placed",
        )
        for name, count in self.basket.items():
            self.products[name].stock -= count
        self.basket.clear()
        return number

    def cancel_order(self, number: int) -> None:
        order = self.order(number)
        if order.customer != USER or order.status != "placed":
            raise FormError("Only an order of your own that is not yet shipped can be cancelled.")
        order.status = "cancelled"
        for name, count in order.quantities.items():
            self.products[name].stock += count

    def add_review(self, name: str, stars: int, text: str) -> None:
        self.product(name)
        if not 1 <= stars <= MAX_STARS or not text.strip():
            raise FormError(f"A review has 1 to {MAX_STARS} stars and a text.")
        self.reviews[max(self.reviews, default=0) + 1] = Review(
            product=name, author=USER, stars=stars, text=" ".join(text.split())[:500]
        )

    def set_address(self, address: str) -> None:
        if not address.strip():
            raise FormError("The address is empty.")
        self.address = " ".join(address.split())[:200]

    # ---- what admins do ----------------------------------------------------------------------------------

    def set_product(self, name: str, *, cents: int, stock: int) -> None:
        product = self.product(name)
        product.cents, product.stock = cents, stock

    def set_status(self, number: int, status: str) -> None:
        if status not in STATUSES:
            raise FormError("There is no such status.")
        self.order(number).status = status

    def delete_review(self, number: int) -> None:
        if self.reviews.pop(number, None) is None:
            raise FormError("There is no such review.")


def draw_shop(rng: random.Random) -> Shop:
    """A shop of twelve products, with some orders and reviews."""
    adjectives = rng.sample(ADJECTIVES, len(ADJECTIVES))
    nouns = [(category, noun) for category, each in NOUNS.items() for noun in each]
    names = [f"{adjective} {noun}" for adjective, (_, noun) in zip(adjectives, nouns, strict=True)]
    cents = rng.sample(range(400, 10_000, 25), len(names))
    products = {
        name: Product(name=name, category=category, cents=each, stock=rng.randint(4, 400))
        for name, (category, _), each in zip(names, nouns, cents, strict=True)
    }
    shop = Shop(products=products, orders={}, reviews={}, address=draw_address(rng))
    for number in range(_FIRST_ORDER, _FIRST_ORDER + _NUM_ORDERS):
        shop.orders[number] = _draw_order(shop, rng)
    for number in range(1, _NUM_REVIEWS + 1):
        author, stars = rng.choice(PEOPLE), rng.randint(1, MAX_STARS)
        text = rng.choice(OPINIONS)
        shop.reviews[number] = Review(product=rng.choice(names), author=author, stars=stars, text=text)
    return shop


def draw_address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)}"


def _draw_order(shop: Shop, rng: random.Random) -> Order:
    """One of the user's own in half of all cases."""
    quantities = {name: rng.randint(1, 4) for name in rng.sample(list(shop.products), rng.randint(1, 2))}
    return Order(
        customer=rng.choice((USER, rng.choice(PEOPLE))),
        quantities=quantities,
        cents=sum(shop.products[name].cents * count for name, count in quantities.items()),
        address=draw_address(rng),
        status=rng.choice(STATUSES),
    )
