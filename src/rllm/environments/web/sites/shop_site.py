"""The shop as a website: its pages, and the forms that change its books.

GET  /, /product/NAME, /basket, /orders, /order/N, /account           what customers see
GET  /admin, /admin/products, /admin/product/NAME, /admin/orders, …   what the shop's owner sees
POST the same ──► a rule of `Shop` ──► 303 to the page that shows it, or the page with what is wrong
"""

from collections.abc import Callable, Mapping
from html import escape
from urllib.parse import quote

from rllm.environments.web.network import SiteRequest, SiteResponse
from rllm.environments.web.sites.pages import (
    FormError,
    cents_of,
    choice,
    field,
    form,
    form_values,
    link,
    page,
    price,
    redirect,
    table,
    whole_number,
)
from rllm.environments.web.sites.shop import MAX_STARS, NOUNS, STATUSES, USER, Order, Product, Shop

HOST = "shop.test"
_LINKS = {
    "Products": "/",
    "Basket": "/basket",
    "My orders": "/orders",
    "Account": "/account",
    "Admin": "/admin",
}
_ADMIN_LINKS = {
    "Shop": "/",
    "Stock and prices": "/admin/products",
    "All orders": "/admin/orders",
    "All reviews": "/admin/reviews",
}
_MAX_QUANTITY = 999
_STARS = tuple(str(number) for number in range(MAX_STARS, 0, -1))

Values = Mapping[str, str]


class ShopSite:
    """Answers requests to one shop."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    def __call__(self, request: SiteRequest) -> SiteResponse:
        head, *rest = request.path.strip("/").split("/")
        if head == "admin":
            kind, item = (*rest, "", "")[:2]
            place = f"admin/{kind}" if kind else "admin"
        else:
            place, item = head, "/".join(rest)
        values = form_values(request)
        try:
            if request.method != "POST":
                return self._show(place, item, values)
            try:
                return redirect(self._change(place, item, values))
            except FormError as error:
                return self._show(place, item.partition("/")[0], values, str(error))
        except FormError:
            return SiteResponse(status=404, body=b"<title>Not found</title>There is no such page.")

    def _show(self, place: str, item: str, values: Values, error: str = "") -> SiteResponse:
        pages: dict[str, Callable[[str, Values], tuple[str, str]]] = {
            "": self._products,
            "product": self._product,
            "basket": self._basket,
            "orders": self._orders,
            "order": self._order,
            "account": self._account,
            "admin": self._admin,
            "admin/products": self._admin_products,
            "admin/product": self._admin_product,
            "admin/orders": self._admin_orders,
            "admin/order": self._admin_order,
            "admin/reviews": self._admin_reviews,
        }
        if place not in pages:
            raise FormError("There is no such page.")
        title, body = pages[place](item, values)
        return page(title, body, links=_ADMIN_LINKS if place.startswith("admin") else _LINKS, error=error)

    # ---- customers ---------------------------------------------------------------------------------------

    def _products(self, item: str, values: Values) -> tuple[str, str]:
        category = values.get("category", "")
        rows = [
            (link(each.name, _address_of(each)), escape(each.category), price(each.cents))
            for each in self.shop.products.values()
            if category in ("", each.category)
        ]
        categories = " ".join(link(each, f"/?category={each}") for each in NOUNS)
        return category or "Products", f"<p>{categories}</p>{table(('Name', 'Category', 'Price'), rows)}"

    def _product(self, item: str, values: Values) -> tuple[str, str]:
        product = self.shop.product(item)
        reviews = self.shop.reviews_of(item).values()
        rows = [(escape(each.author), f"{each.stars} stars", escape(each.text)) for each in reviews]
        facts = f"<p>Category: {escape(product.category)}</p><p>Price: {price(product.cents)}</p>"
        stock = f"<p>In stock: {product.stock}</p>"
        add = form(f"{_address_of(product)}/basket", "Add to basket", field("Quantity", "quantity", "1"))
        stars = choice("Stars", "stars", _STARS, "5")
        write = form(f"{_address_of(product)}/review", "Send review", stars, field("Your review", "text"))
        return item, f"{facts}{stock}{add}<h2>Reviews</h2>{table(('By', 'Stars', 'Text'), rows)}{write}"

    def _basket(self, item: str, values: Values) -> tuple[str, str]:
        if not self.shop.basket:
            return "Basket", "<p>The basket is empty.</p>"
        rows = [
            form(
                f"/basket/{quote(name)}",
                f"Update {name}",
                field(f"Quantity of {name}", "quantity", str(count)),
            )
            for name, count in self.shop.basket.items()
        ]
        facts = f"<p>Total: {price(self.shop.basket_cents())}</p><p>To: {escape(self.shop.address)}</p>"
        return (
            "Basket",
            f"{''.join(rows)}<p>0 takes a product out.</p>{facts}{form('/basket', 'Place order')}",
        )

    def _orders(self, item: str, values: Values) -> tuple[str, str]:
        own = {number: each for number, each in self.shop.orders.items() if each.customer == USER}
        rows = [
            (link(f"Order {number}", f"/order/{number}"), price(each.cents), each.status)
            for number, each in own.items()
        ]
        return "My orders", table(("Order", "Total", "Status"), rows)

    def _order(self, item: str, values: Values) -> tuple[str, str]:
        order = self.shop.order(_number(item))
        if order.customer != USER:
            raise FormError("It is somebody else's.")
        cancel = form(f"/order/{item}", "Cancel order") if order.status == "placed" else ""
        return f"Order {item}", f"{_order_facts(order)}{cancel}"

    def _account(self, item: str, values: Values) -> tuple[str, str]:
        address = values.get("address", self.shop.address)
        return "Account", form("/account", "Save address", field("Address", "address", address))

    # ---- the owner ---------------------------------------------------------------------------------------

    def _admin(self, item: str, values: Values) -> tuple[str, str]:
        return "Admin", f"<p>{len(self.shop.products)} products, {len(self.shop.orders)} orders</p>"

    def _admin_products(self, item: str, values: Values) -> tuple[str, str]:
        rows = [
            (
                link(each.name, f"/admin/product/{quote(each.name)}"),
                escape(each.category),
                price(each.cents),
                str(each.stock),
            )
            for each in self.shop.products.values()
        ]
        return "Stock and prices", table(("Name", "Category", "Price", "Stock"), rows)

    def _admin_product(self, item: str, values: Values) -> tuple[str, str]:
        product = self.shop.product(item)
        fields = (
            field("Price", "price", values.get("price", price(product.cents))),
            field("Stock", "stock", values.get("stock", str(product.stock))),
        )
        return item, form(f"/admin/product/{quote(item)}", "Save", *fields)

    def _admin_orders(self, item: str, values: Values) -> tuple[str, str]:
        rows = [
            (
                link(f"Order {number}", f"/admin/order/{number}"),
                escape(each.customer),
                price(each.cents),
                each.status,
            )
            for number, each in self.shop.orders.items()
        ]
        return "All orders", table(("Order", "Customer", "Total", "Status"), rows)

    def _admin_order(self, item: str, values: Values) -> tuple[str, str]:
        order = self.shop.order(_number(item))
        change = form(f"/admin/order/{item}", "Save", choice("Status", "status", STATUSES, order.status))
        return f"Order {item}", f"<p>Customer: {escape(order.customer)}</p>{_order_facts(order)}{change}"

    def _admin_reviews(self, item: str, values: Values) -> tuple[str, str]:
        rows = [
            (
                escape(each.product),
                escape(each.author),
                f"{each.stars} stars",
                escape(each.text),
                form(f"/admin/reviews/{number}", f"Delete review {number}"),
            )
            for number, each in self.shop.reviews.items()
        ]
        return "All reviews", table(("Product", "By", "Stars", "Text", "Delete"), rows)

    # ---- forms -------------------------------------------------------------------------------------------

    def _change(self, place: str, item: str, values: Values) -> str:
        """Do what a form asks for; the address of the page to show then."""
        shop = self.shop
        match place:
            case "product":
                return self._change_product_page(item, values)
            case "basket" if item:
                shop.set_quantity(item, _quantity(values))
                return "/basket"
            case "basket":
                return f"/order/{shop.place_order()}"
            case "order":
                shop.cancel_order(_number(item))
                return f"/order/{item}"
            case "account":
                shop.set_address(values.get("address", ""))
                return "/account"
            case "admin/product":
                cents = cents_of(values.get("price", ""))
                stock = whole_number(values.get("stock", ""), "The stock", most=100_000)
                shop.set_product(item, cents=cents, stock=stock)
                return "/admin/products"
            case "admin/order":
                shop.set_status(_number(item), values.get("status", ""))
                return "/admin/orders"
            case "admin/reviews":
                shop.delete_review(_number(item))
                return "/admin/reviews"
            case _:
                raise FormError("There is no such form.")

    def _change_product_page(self, item: str, values: Values) -> str:
        name, _, form_name = item.partition("/")
        if form_name == "review":
            stars = whole_number(values.get("stars", ""), "Stars", most=MAX_STARS)
            self.shop.add_review(name, stars, values.get("text", ""))
            return f"/product/{quote(name)}"
        quantity = _quantity(values)
        if quantity == 0:
            raise FormError("The quantity must be at least 1.")
        self.shop.set_quantity(name, self.shop.basket.get(name, 0) + quantity)
        return "/basket"


def _quantity(values: Values) -> int:
    return whole_number(values.get("quantity", ""), "The quantity", most=_MAX_QUANTITY)


def _number(item: str) -> int:
    return whole_number(item, "The number", most=10**8)


def _address_of(product: Product) -> str:
    return f"/product/{quote(product.name)}"


def _order_facts(order: Order) -> str:
    rows = [(escape(name), str(count)) for name, count in order.quantities.items()]
    lines = table(("Product", "Pieces"), rows)
    total, to = f"<p>Total: {price(order.cents)}</p>", f"<p>To: {escape(order.address)}</p>"
    return f"{lines}{total}{to}<p>Status: {order.status}</p>"
